"""An error that lies in one request ends its branch alone: the cache and all other requests lose nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.engine_core import EngineCore
from engine.protocol.constraint import Constraint
from engine.protocol.types import (
    Branch,
    Completion,
    EngineError,
    GenerateRequest,
    InvalidRequest,
    ScoreItem,
)
from engine.sampling.grammar import Grammar
from engine.sampling.logits_processors import Penalties
from engine.scheduler.sequence import Event, GenerateSequence
from engine.speculation.control.controller import FixedController
from engine.text.detokenizer import StopStrings, TextReader
from tests.engine.conftest import Checkpoints, save_checkpoint
from tests.engine.helpers import SMALL, Harness, generate, score
from tests.engine.speculation.stub_drafters import Oracle

PROMPT = list(range(100, 137))
BAD = "bad"
DIGITS = Constraint("regex", "[0-9]{2,40}")
MANY_DIGITS = Constraint("regex", "[0-9]{60,80}")
"""More than the tokens of a request below: no branch ends before its limit."""
HEAT = 1000.0
"""Temperature at which random weights do not decide between two characters."""
NEIGHBOURS = [
    generate([*PROMPT, 7], [Branch(1, 1, 12), Branch(1, 2, 20)], request_id="free", temperature=0.9, ignore_eos=True),
    replace(
        generate([*PROMPT, 8], [Branch(2, 1, 12)], request_id="held", frequency_penalty=0.5, stop=("zz",)),
        constraint=DIGITS,
    ),
    generate([*PROMPT, 9], [Branch(3, 1, 12)], request_id="told", temperature=0.7, logprobs=2, prompt_logprobs=1),
]


@dataclass
class Plant:
    """An error planted where the data of one branch is touched, once that branch has two tokens."""

    target: type
    method: str
    find: Callable[[GenerateSequence], object]
    """Returns the object of the branch whose method fails."""
    is_shared: bool = False
    """True if the branches of a request share the object."""

    def install(self, sequence: GenerateSequence, patch: pytest.MonkeyPatch) -> None:
        real, own = getattr(self.target, self.method), self.find(sequence)

        def fail(this: object, *rest: Any, **named: Any) -> Any:
            if this is own and len(sequence.generated) >= 2:
                raise ZeroDivisionError("planted")
            return real(this, *rest, **named)

        patch.setattr(self.target, self.method, fail)


PLANTS = {
    "mask": Plant(Grammar, "compute_masks", lambda branch: branch.grammar),
    "grammar": Plant(Grammar, "accept", lambda branch: branch.grammar),
    "penalties": Plant(Penalties, "add", lambda branch: branch.penalties),
    "tokens": Plant(GenerateSequence, "append", lambda branch: branch),
    "detokenizer": Plant(TextReader, "advance", lambda branch: branch.reader),
    "stop strings": Plant(StopStrings, "may_end", lambda branch: branch.stop_strings, is_shared=True),
    "last text": Plant(TextReader, "final", lambda branch: branch.reader),
}
DRAFT_PLANTS = {
    "forced tokens": Plant(Grammar, "find_forced", lambda branch: branch.grammar),
    "draft's tokens": Plant(Grammar, "find_valid", lambda branch: branch.grammar),
}


def bad_request() -> GenerateRequest:
    law: dict[str, Any] = {"presence_penalty": 0.1, "stop": ("77777",), "temperature": 1.0}
    branches = [Branch(5, key, 8) for key in range(3)]
    return replace(generate([*PROMPT, 99], branches, request_id=BAD, **law), constraint=MANY_DIGITS)


def bad_branch(harness: Harness) -> GenerateSequence:
    """Return the middle branch of the request that was submitted last."""
    sequence = harness.core._requests[-1].sequences[1]
    assert isinstance(sequence, GenerateSequence)
    return sequence


@pytest.fixture(autouse=True)
def _cache_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in which the cache is emptied."""
    monkeypatch.setattr(EngineCore, "_restart", lambda _: pytest.fail("the cache is emptied"))


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints) -> list[list[Completion]]:
    """The neighbours' completions in an engine of their own."""
    harness = warm(checkpoints("qwen3"))
    events = [harness.submit(request, stream=True) for request in NEIGHBOURS]
    harness.run()
    return [completions(one) for one in events]


def warm(folder: Path) -> Harness:
    """Return an engine that has the prompt cached."""
    harness = Harness(folder, replace(SMALL, deterministic=True))
    harness.complete(generate(PROMPT, [Branch(0, 0, 1)]))
    return harness


def completions(events: list[Event]) -> list[Completion]:
    return sorted((event for event in events if isinstance(event, Completion)), key=lambda one: one.index)


def errors(events: list[Event]) -> list[EngineError]:
    return [event for event in events if isinstance(event, EngineError)]


@pytest.mark.parametrize("name", PLANTS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_in_one_branchs_data_ends_that_branch_alone(
    checkpoints: Checkpoints, plain: list[list[Completion]], monkeypatch: pytest.MonkeyPatch, name: str, stream: bool
) -> None:
    alone = warm(checkpoints("qwen3"))
    siblings = alone.complete(bad_request())
    harness = warm(checkpoints("qwen3"))
    heard = [harness.submit(request, stream=stream) for request in NEIGHBOURS]
    bad = harness.submit(bad_request(), stream=stream or name == "detokenizer")
    PLANTS[name].install(bad_branch(harness), monkeypatch)
    harness.run()
    for events, theirs in zip(heard, plain, strict=True):
        assert completions(events) == theirs
    assert errors(bad) == [bad[-1]]
    assert "ZeroDivisionError('planted')" in str(bad[-1])
    assert [(one.index, one.token_ids) for one in completions(bad)] == [
        (one.index, one.token_ids) for one in siblings if one.index != 1 and not PLANTS[name].is_shared
    ]
    [later] = harness.complete(generate([*PROMPT, 99], [Branch(0, 0, 1)]))
    assert later.cached_tokens == len(PROMPT)


@pytest.mark.parametrize("name", PLANTS | DRAFT_PLANTS)
def test_with_drafts_such_an_error_takes_none_from_the_others(
    checkpoints: Checkpoints, plain: list[list[Completion]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    harness = warm(checkpoints("qwen3"))
    truth = {
        (branch.seed, branch.key, len(request.prompt) + place): token
        for request, theirs in zip(NEIGHBOURS, plain, strict=True)
        for branch, completion in zip(request.branches, theirs, strict=True)
        for place, token in enumerate(completion.token_ids)
    }
    harness.core.start_speculation(Oracle(truth, 360, 0.8), FixedController(3, 3))
    heard = [harness.submit(request) for request in NEIGHBOURS]
    bad = harness.submit(bad_request(), stream=True)
    (PLANTS | DRAFT_PLANTS)[name].install(bad_branch(harness), monkeypatch)
    harness.run()
    for events, theirs in zip(heard, plain, strict=True):
        assert [one.token_ids for one in completions(events)] == [one.token_ids for one in theirs]
        assert sum(one.accepted_tokens for one in completions(events)) > 0
    assert errors(bad) == [bad[-1]]


def test_a_language_with_a_dead_end_ends_the_branch_that_goes_there_with_a_refusal(checkpoints: Checkpoints) -> None:
    harness = warm(checkpoints("qwen3"))
    dead_end = Constraint("grammar", 'start: "a" /[a-z&&[^a-z]]/ | "b"')
    branches = [Branch(5, key, 8) for key in range(12)]
    bad = harness.submit(replace(generate(PROMPT, branches, temperature=HEAT), constraint=dead_end))
    harness.run()
    assert {one.text for one in completions(bad)} == {"b"}
    assert 0 < len(completions(bad)) < 12
    [error] = errors(bad)
    assert isinstance(error, InvalidRequest)
    assert error.field == "constraint"
    assert "cannot be followed here" in str(error)


def test_a_draft_token_before_a_dead_end_does_not_end_a_branch_that_rejects_it(checkpoints: Checkpoints) -> None:
    dead_end = Constraint("grammar", 'start: "x" ("a" /[a-z&&[^a-z]]/ | "b")')
    [plain] = Harness(checkpoints("qwen3")).complete(request := choose_b(checkpoints, dead_end))
    assert plain.text == "xb"
    harness = Harness(checkpoints("qwen3"))
    encode = harness.core.model.tokenizer.encode
    truth = {(request.branches[0].seed, request.branches[0].key, len(PROMPT) + 1): encode("a")[0]}
    harness.core.start_speculation(Oracle(truth, 360, 1.0), FixedController(3, 3))
    [drafted] = harness.complete(request)
    assert drafted.token_ids == plain.token_ids
    assert drafted.drafted_tokens > 0


def choose_b(checkpoints: Checkpoints, constraint: Constraint) -> GenerateRequest:
    """Return a request whose branch takes the alternative with a text."""
    for key in range(40):
        request = replace(generate(PROMPT, [Branch(5, key, 8)], temperature=HEAT), constraint=constraint)
        if Harness(checkpoints("qwen3")).complete(request):
            return request
    raise AssertionError("no branch has sampled a text")


@pytest.fixture(scope="module")
def nan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in which the embedding of token 399, which is no text, is not finite."""
    folder = tmp_path_factory.mktemp("nan")
    save_checkpoint("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][399] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_prompt_that_makes_logits_not_finite_ends_its_own_requests_alone(nan_folder: Path) -> None:
    harness = warm(nan_folder)
    free, _, told = NEIGHBOURS
    expected = [completions(warm_events(nan_folder, request)) for request in (free, told)]
    heard = [harness.submit(request) for request in (free, told)]
    poisoned = [*PROMPT, 399, *range(50)]
    bad = [
        harness.submit(generate(poisoned, [Branch(1, key, 5) for key in range(2)], pin_key="job")),
        harness.submit(generate(poisoned, [Branch(1, 1, 5)], prompt_logprobs=3)),
        harness.submit(generate(poisoned, [Branch(1, 1, 5)], logprobs=3, pin_key="job")),
        harness.submit(score(ScoreItem((tuple(poisoned),), (0,)), token_ids=(7,))),
    ]
    harness.run()
    for events in bad:
        [error] = events
        assert "not finite" in str(error)
    assert [completions(events) for events in heard] == expected
    assert bool(harness.core.cache.data.isfinite().all())
    [later] = harness.complete(generate([*PROMPT, 99], [Branch(0, 0, 1)]))
    assert later.cached_tokens == len(PROMPT)


def warm_events(folder: Path, request: GenerateRequest) -> list[Event]:
    harness = warm(folder)
    events = harness.submit(request)
    harness.run()
    return events


def test_damaged_keys_end_all_that_read_them_and_are_computed_anew(checkpoints: Checkpoints) -> None:
    harness = warm(checkpoints("qwen3"))
    other = generate(range(200, 230), [Branch(4, 4, 30)], ignore_eos=True)
    expected = warm(checkpoints("qwen3")).complete(other)
    unharmed = harness.submit(other)
    readers = [
        harness.submit(generate([*PROMPT, 7], [Branch(1, 1, 20)], ignore_eos=True, pin_key="l")) for _ in range(2)
    ]
    for _ in range(3):
        harness.core.step()
    [first] = {sequence.pages.pages[0] for request in harness.core._requests[1:] for sequence in request.sequences}
    harness.core.cache.data[:, :, :, first] = torch.nan
    harness.run()
    for events in readers:
        [error] = errors(events)
        assert "not finite" in str(error)
    assert completions(unharmed) == expected
    plain = generate([*PROMPT, 7], [Branch(1, 1, 20)], ignore_eos=True)
    again = harness.complete(plain)
    assert again == Harness(checkpoints("qwen3"), replace(SMALL, deterministic=True)).complete(plain)
    assert again[0].cached_tokens == 0


def test_an_error_while_a_request_is_cancelled_leaves_its_other_branches_their_answers(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = warm(checkpoints("qwen3"))
    bad = harness.submit(bad_request())
    PLANTS["last text"].install(bad_branch(harness), monkeypatch)
    for _ in range(4):
        harness.core.step()
    harness.core.cancel(lambda request: request.request_id == BAD)
    harness.core.check_invariants()
    assert [(one.index, one.finish_reason) for one in completions(bad)] == [(0, "cancelled"), (2, "cancelled")]
    assert errors(bad) == [bad[-1]]


def impossible() -> Iterator[tuple[str, str]]:
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    yield "json", json.dumps(loop)
    yield "json", json.dumps({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})
    yield "json", json.dumps({"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1})
    yield "json", "false"
    yield "regex", "[a-z&&[^a-z]]"
    yield "regex", "abc[^\\s\\S]"
    yield "grammar", 'start: "a" /[a-z&&[^a-z]]/'
    yield "grammar", "start: /[a-z]{30}/ WORD\nWORD: /b+/ & /c+/"
    yield "grammar", 'start: "a" start'
    yield "grammar", 'start: "a" b\nb: c "x"\nc: b | b b'


@pytest.mark.parametrize(("kind", "value"), list(impossible()))
def test_a_constraint_that_no_text_fulfils_is_refused_before_it_runs(
    checkpoints: Checkpoints, kind: Any, value: str
) -> None:
    harness = warm(checkpoints("qwen3"))
    request = replace(generate(PROMPT, [Branch(1, 1, 5)]), constraint=Constraint(kind, value))
    with pytest.raises(InvalidRequest, match="the constraint cannot be enforced: ") as refusal:
        harness.submit(request)
    assert refusal.value.field == "constraint"


def test_a_stop_token_that_the_language_forces_ends_the_branch_with_and_without_drafts(
    checkpoints: Checkpoints,
) -> None:
    harness = Harness(checkpoints("qwen3"))
    tokens = harness.core.model.tokenizer.encode("abcdef")
    request = replace(
        generate(PROMPT, [Branch(1, 1, 20)], stop_token_ids=(tokens[2],)), constraint=Constraint("choice", '["abcdef"]')
    )
    [plain] = harness.complete(request)
    harness.core.start_speculation(Oracle({}, 360, 0.0), FixedController(3, 3))
    [drafted] = harness.complete(request)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stop == plain.stop
