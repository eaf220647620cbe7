"""Branches that are held to a language: every text is of it, and sampled from the renormalised distribution."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("llguidance", reason="the package llguidance is not installed")

from engine.protocol.constraint import Constraint
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, GenerateRequest, InvalidRequest, SamplingParams
from engine.sampling.gpu import restrict_on_gpu
from engine.sampling.grammar import Grammar, GrammarCompiler, restrict
from engine.speculation.control.controller import FixedController
from tests.engine.conftest import Checkpoints, small_tokenizer
from tests.engine.grammar.constraints import CHOICE, EOS, KINDS, PROMPT, WORDS, Guesses, make_request
from tests.engine.helpers import Harness
from tests.seeds import shift


def is_valid(constraint: Constraint, text: str) -> bool:
    match constraint.kind:
        case "json":
            jsonschema.validate(json.loads(text), json.loads(constraint.value))
            return True
        case "regex":
            return re.fullmatch(constraint.value, text) is not None
        case "choice":
            return text in json.loads(constraint.value)
        case "grammar":
            return re.fullmatch(r"\d{1,2}(\+\d{1,2}){1,3}", text) is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_every_text_is_of_the_language(checkpoints: Checkpoints, kind: str, temperature: float) -> None:
    branches = [Branch(seed=1, key=key, max_tokens=200) for key in range(12)]
    constraint = KINDS[kind]
    completions = Harness(checkpoints("qwen3")).complete(make_request(constraint, branches, temperature=temperature))
    assert len({completion.text for completion in completions}) > (temperature > 0) * 2
    for completion in completions:
        assert completion.finish_reason == "stop"
        assert completion.stop == EOS
        assert is_valid(constraint, completion.text)


def test_one_batch_holds_branches_of_several_languages_and_of_none(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    branches = [Branch(seed=1, key=key, max_tokens=60) for key in range(3)]
    requests = [make_request(constraint, branches, temperature=2.0) for constraint in KINDS.values()]
    free = GenerateRequest("free", "m", PROMPT, tuple(branches), SamplingParams(temperature=2.0))
    alone = [[one.token_ids for one in Harness(folder).complete(request)] for request in (*requests, free)]
    harness = Harness(folder)
    events = [harness.submit(request) for request in (*requests, free)]
    harness.run()
    for own, expected in zip(events, alone, strict=True):
        completions = sorted((one for one in own if isinstance(one, Completion)), key=lambda one: one.index)
        assert [one.token_ids for one in completions] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_that_is_cut_and_continued_gets_the_same_tokens(checkpoints: Checkpoints, kind: str) -> None:
    harness = Harness(checkpoints("qwen3"))
    whole = harness.complete(make_request(KINDS[kind], [Branch(seed=1, key=4, max_tokens=200)], temperature=2.0))[0]
    for cut in range(1, len(whole.token_ids)):
        first = whole.token_ids[:cut]
        by_generated = Branch(seed=1, key=4, max_tokens=200, generated=first)
        rest = harness.complete(make_request(KINDS[kind], [by_generated], temperature=2.0))[0]
        assert first + rest.token_ids == whole.token_ids
        in_prompt = Branch(seed=1, key=4, max_tokens=200, constraint_start=len(PROMPT))
        request = replace(make_request(KINDS[kind], [in_prompt], temperature=2.0), prompt=PROMPT + first)
        rest = harness.complete(request)[0]
        assert first + rest.token_ids == whole.token_ids


def test_preemption_keeps_the_tokens(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    branches = [Branch(seed=1, key=key, max_tokens=40) for key in range(16)]
    request = make_request(Constraint("regex", "[a-d]{60}"), branches, temperature=2.0)
    expected = [one.token_ids for one in Harness(folder).complete(request)]
    small = Harness(folder, EngineOptions(kv_tokens=384, max_running=16, step_tokens=64, page_size=16))
    assert [one.token_ids for one in small.complete(request)] == expected
    assert small.core.stats.preemptions


def test_a_lifting_token_frees_the_rest_and_any_other_first_token_does_not(checkpoints: Checkpoints) -> None:
    opening = 1  # a special token, which no text of the language contains
    harness = Harness(checkpoints("qwen3"))
    branches = [Branch(seed=1, key=key, max_tokens=30) for key in range(40)]
    favour = {"temperature": 3.0, "logit_bias": ((opening, 8.0),)}
    completions = harness.complete(make_request(CHOICE, branches, (opening,), **favour))
    freed = [one for one in completions if one.token_ids[0] == opening]
    held = [one for one in completions if one.token_ids[0] != opening]
    assert freed
    assert held
    assert all(one.text in WORDS for one in held)
    assert not any(one.text in WORDS for one in freed)
    # Where the constrained text begins again, after what was free, it holds.
    start = len(PROMPT) + len(freed[0].token_ids)
    again = Branch(seed=1, key=1, max_tokens=30, generated=freed[0].token_ids, constraint_start=start)
    assert harness.complete(make_request(CHOICE, [again], **favour))[0].text in WORDS


def test_forced_tokens_are_drafted_and_change_nothing(checkpoints: Checkpoints) -> None:
    folder, name = checkpoints("qwen3"), "a_long_name_of_a_property"
    constraint = Constraint(
        "json",
        json.dumps(
            {"type": "object", "properties": {name: {"const": 7}}, "required": [name], "additionalProperties": False}
        ),
    )
    request = make_request(constraint, [Branch(seed=1, key=key, max_tokens=40) for key in range(4)], temperature=1.0)
    expected = [one.token_ids for one in Harness(folder).complete(request)]
    harness = Harness(folder)
    harness.core.start_speculation(Guesses({(1,): 1.0}), FixedController(8, 8))
    assert [one.token_ids for one in harness.complete(request)] == expected
    stats = harness.core.speculation_stats
    assert stats is not None
    assert stats.accepted > 2 * len(name)


@given(data=st.data())
def test_masks_after_drafts_are_those_of_a_branch_that_has_these_tokens(data: st.DataObject) -> None:
    compiler = make_compiler()
    start = data.draw(st.sampled_from([(), tuple(small_tokenizer().encode('{"step'))]))
    grammar = compiler.start(KINDS["json"], start, frozenset())
    tokens: list[int] = []
    parents: list[int] = []
    texts: dict[int, tuple[int, ...]] = {-1: ()}
    for _ in range(data.draw(st.integers(0, 8))):
        parent = data.draw(st.sampled_from([*texts]))
        fresh = compiler.start(KINDS["json"], (*start, *texts[parent]), frozenset())
        allowed = [token for token in _allowed(fresh.compute_masks((), ())[0]) if token != EOS]
        if not allowed:
            continue
        tokens.append(data.draw(st.sampled_from(allowed)))
        parents.append(parent)
        texts[len(tokens) - 1] = (*texts[parent], tokens[-1])
    assert grammar.find_valid(tokens, parents) == list(range(len(tokens)))
    masks = grammar.compute_masks(tokens, parents)
    for index, text in texts.items():
        fresh = compiler.start(KINDS["json"], (*start, *text), frozenset())
        assert _allowed(masks[index + 1]) == _allowed(fresh.compute_masks((), ())[0])
    assert _allowed(grammar.compute_masks((), ())[0]) == _allowed(masks[0])


def make_compiler() -> GrammarCompiler:
    tokenizer = small_tokenizer()
    return GrammarCompiler(tokenizer.backend_tokenizer.to_str, len(tokenizer), {EOS})


def _allowed(mask: Any) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def test_the_gpu_path_masks_the_same_logits_as_the_cpu_path() -> None:
    rng = np.random.default_rng(shift(0))
    logits = torch.from_numpy(rng.normal(size=(5, 333)).astype(np.float32))
    masks = {row: rng.integers(-(2**31), 2**31, 11, np.int32) for row in (0, 2, 4)}
    expected = logits.clone()
    for row, words in masks.items():
        for token in range(333):
            if not int(words[token // 32]) >> token % 32 & 1:
                expected[row, token] = -torch.inf
    on_cpu, on_gpu = logits.clone(), logits.clone()
    restrict(on_cpu.numpy(), masks)
    restrict_on_gpu(on_gpu, masks)
    assert torch.equal(on_cpu, expected)
    assert torch.equal(on_gpu, expected)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint("json", '{"type": "strange"}'), "cannot be enforced: .*strange"),
        (Constraint("json", "[1]"), "no JSON Schema|cannot be enforced"),
        (Constraint("regex", "(a"), "cannot be enforced: .*unclosed group"),
        (Constraint("grammar", "begin: /a/"), "cannot be enforced: .*start"),
    ],
)
def test_a_constraint_that_cannot_be_enforced_is_refused(
    checkpoints: Checkpoints, constraint: Constraint, message: str
) -> None:
    harness = Harness(checkpoints("qwen3"))
    with pytest.raises(InvalidRequest, match=message) as refusal:
        harness.submit(make_request(constraint, [Branch(1, 1, 5)]))
    assert refusal.value.field == "constraint"


def test_settings_that_contradict_a_constraint_are_refused(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"))
    for name, value in (("ignore_eos", True), ("min_tokens", 3)):
        with pytest.raises(InvalidRequest, match=f"{name} cannot be kept"):
            harness.submit(make_request(CHOICE, [Branch(1, 1, 5)], **{name: value}))
    with pytest.raises(InvalidRequest, match="do not fit the constraint"):
        harness.submit(make_request(CHOICE, [Branch(1, 1, 5, generated=(200, 200, 200))]))
    free = replace(make_request(CHOICE, [Branch(1, 1, 5, constraint_start=2)]), constraint=None)
    with pytest.raises(InvalidRequest, match="constraint_start needs a constraint"):
        harness.submit(free)
    with pytest.raises(InvalidRequest, match="constraint_start is 99"):
        harness.submit(make_request(CHOICE, [Branch(1, 1, 5, constraint_start=99)]))


def test_a_language_that_becomes_too_complex_ends_its_own_request_alone(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(checkpoints("qwen3"))
    original = Grammar._compute_mask

    def compute_mask(grammar: Grammar, more: frozenset[int]) -> Any:
        grammar._matcher.consume_token(EOS) if more else None  # an error, which the matcher then keeps
        return original(grammar, frozenset())

    monkeypatch.setattr(Grammar, "_compute_mask", compute_mask)
    bad = harness.submit(make_request(CHOICE, [Branch(1, 1, 20)], (1,), temperature=2.0))
    good = harness.submit(make_request(CHOICE, [Branch(1, 2, 20)], temperature=2.0))
    harness.run()
    assert "cannot be followed here" in str(bad[-1])
    assert isinstance(good[-1], Completion)
    assert good[-1].text in WORDS
