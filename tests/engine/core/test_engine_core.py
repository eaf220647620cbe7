"""The step loop: tokens independent of batching, caching and preemption, and all finish reasons."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.device import KV_DTYPES
from engine.protocol.options import EngineOptions
from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    EngineError,
    GenerateRequest,
    InvalidRequest,
    ScoreItem,
    ScoreRequest,
)
from tests.engine.conftest import Checkpoints
from tests.engine.exact import float32_loss, gap
from tests.engine.helpers import SMALL, Harness, generate, qwen3_for, score
from tests.engine.ties import assert_same_tokens
from tests.seeds import shift

PROMPT = tuple(random.Random(shift(0)).choices(range(3, 360), k=37))
LAW = {"temperature": 0.9, "top_p": 0.97, "ignore_eos": True}


@pytest.fixture
def harness(checkpoints: Checkpoints) -> Harness:
    return Harness(checkpoints("qwen3"))


@pytest.fixture(params=KV_DTYPES)
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tokens_of(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def alone(checkpoints: Checkpoints, branch: Branch, kv_dtype: str = "auto") -> tuple[int, ...]:
    """Return the branch's tokens in a new engine that runs nothing else."""
    harness = Harness(checkpoints(qwen3_for(kv_dtype)), replace(SMALL, kv_dtype=kv_dtype))
    [completion] = harness.complete(generate(PROMPT, [branch], **LAW))
    return completion.token_ids


def same_as_alone(
    checkpoints: Checkpoints, branches: Sequence[Branch], ours: Sequence[Sequence[int]], kv_dtype: str = "auto"
) -> None:
    """Check that the branches' tokens are those that they have alone, up to ties."""
    plain = [alone(checkpoints, branch, kv_dtype) for branch in branches]
    request = generate(PROMPT, branches, **LAW)
    assert_same_tokens(checkpoints(qwen3_for(kv_dtype)), [request], ours, plain, kv_dtype)


def test_a_branch_has_the_same_tokens_alone_and_in_a_batch_of_sixteen(checkpoints: Checkpoints, kv_dtype: str) -> None:
    harness = Harness(checkpoints(qwen3_for(kv_dtype)), replace(SMALL, kv_dtype=kv_dtype))
    branches = [Branch(seed=5, key=key, max_tokens=30) for key in range(16)]
    together = tokens_of(harness.complete(generate(PROMPT, branches, **LAW)))
    same_as_alone(checkpoints, branches, together, kv_dtype)
    assert len(set(together)) == 16


def test_a_branch_has_the_same_tokens_after_a_cache_hit(checkpoints: Checkpoints, kv_dtype: str) -> None:
    harness = Harness(checkpoints(qwen3_for(kv_dtype)), replace(SMALL, kv_dtype=kv_dtype))
    branch = Branch(seed=5, key=1, max_tokens=30)
    [first] = harness.complete(generate(PROMPT, [branch], **LAW))
    [second] = harness.complete(generate(PROMPT, [branch], **LAW))
    assert (first.cached_tokens, second.cached_tokens) == (0, len(PROMPT) - 1)
    same_as_alone(checkpoints, [branch] * 2, [first.token_ids, second.token_ids], kv_dtype)


def test_a_branch_has_the_same_tokens_after_preemption(checkpoints: Checkpoints, kv_dtype: str) -> None:
    # Room for about three of the eight branches at their full length.
    options = EngineOptions(kv_tokens=320, max_running=8, step_tokens=64, kv_dtype=kv_dtype)
    harness = Harness(checkpoints(qwen3_for(kv_dtype)), options)
    branches = [Branch(seed=5, key=key, max_tokens=60) for key in range(8)]
    squeezed = tokens_of(harness.complete(generate(PROMPT, branches, **LAW)))
    assert harness.core.stats.preemptions > 0
    same_as_alone(checkpoints, branches, squeezed, kv_dtype)


def test_cutting_a_branch_anywhere_changes_no_token(checkpoints: Checkpoints, kv_dtype: str) -> None:
    harness = Harness(checkpoints(qwen3_for(kv_dtype)), replace(SMALL, kv_dtype=kv_dtype))
    whole = alone(checkpoints, Branch(seed=9, key=2, max_tokens=24), kv_dtype)
    for cut in range(1, 24):
        rest = Branch(seed=9, key=2, max_tokens=24 - cut, generated=whole[:cut])
        [completion] = harness.complete(generate(PROMPT, [rest], **LAW))
        folder = checkpoints(qwen3_for(kv_dtype))
        assert_same_tokens(folder, [generate(PROMPT, [rest], **LAW)], [completion.token_ids], [whole[cut:]], kv_dtype)


def test_prompt_tokens_and_generated_tokens_give_the_same_continuation(
    checkpoints: Checkpoints, harness: Harness
) -> None:
    whole = alone(checkpoints, Branch(seed=9, key=2, max_tokens=20))
    request = generate((*PROMPT, *whole[:8]), [Branch(seed=9, key=2, max_tokens=12)], **LAW)
    [completion] = harness.complete(request)
    assert_same_tokens(checkpoints("qwen3"), [request], [completion.token_ids], [whole[8:]])


def test_extending_a_cached_branch_computes_only_its_new_tokens(harness: Harness) -> None:
    [first] = harness.complete(generate(PROMPT, [Branch(1, 1, 20)], **LAW))
    extended = Branch(1, 1, 5, generated=first.token_ids)
    [second] = harness.complete(generate(PROMPT, [extended], **LAW))
    # The last sampled token was not computed; everything before it was.
    assert second.prompt_tokens - second.cached_tokens == 1
    assert second.prompt_tokens == len(PROMPT) + 20


def test_siblings_compute_their_shared_prompt_once(harness: Harness) -> None:
    completions = harness.complete(generate(PROMPT, [Branch(1, key, 4) for key in range(8)], **LAW))
    assert [completion.cached_tokens for completion in completions] == [0] + [len(PROMPT) - 1] * 7


def test_requests_with_the_same_new_prefix_compute_it_once(harness: Harness) -> None:
    first = harness.submit(generate((*PROMPT, 7, 8, 9), [Branch(1, 1, 3)], **LAW))
    second = harness.submit(generate((*PROMPT, 10, 11), [Branch(1, 1, 3)], **LAW))
    harness.run()
    cached = [event.cached_tokens for event in first + second if isinstance(event, Completion)]
    assert cached == [0, len(PROMPT)]


def test_the_sum_of_log_probabilities_agrees_with_scores(harness: Harness, checkpoints: Checkpoints) -> None:
    """The reported sum of log-probabilities equals the one computed from scores of other steps."""
    [completion] = harness.complete(generate(PROMPT, [Branch(3, 3, 12)], ignore_eos=True))
    parts = (PROMPT, *((token,) for token in completion.token_ids))
    [scored] = harness.score(score(ScoreItem(parts, tuple(range(12))), token_ids=range(400)))
    assert scored.values is not None
    rows = torch.tensor(scored.values, dtype=torch.float64).log_softmax(dim=-1)
    expected = rows.gather(1, torch.tensor(completion.token_ids)[:, None]).sum()
    assert completion.logprob == pytest.approx(float(expected), abs=12 * gap(checkpoints("qwen3")))


def test_max_tokens_ends_a_branch_with_length(harness: Harness) -> None:
    [completion] = harness.complete(generate(PROMPT, [Branch(1, 1, 1)], **LAW))
    assert (completion.finish_reason, len(completion.token_ids), completion.stop) == ("length", 1, None)


def test_the_context_limit_ends_a_branch(harness: Harness) -> None:
    prompt = [5] * 250
    [completion] = harness.complete(generate(prompt, [Branch(1, 1, 100)], **LAW))
    assert (completion.finish_reason, len(completion.token_ids)) == ("context", 6)


def test_a_pool_smaller_than_the_context_bounds_the_context(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"), EngineOptions(kv_tokens=64, max_running=4, step_tokens=64))
    assert harness.core.model.info.context == 64
    completions = harness.complete(generate(PROMPT, [Branch(1, key, 64) for key in range(4)], **LAW))
    assert [(one.finish_reason, len(one.token_ids)) for one in completions] == [("context", 64 - len(PROMPT))] * 4


def test_end_of_sequence_and_stop_tokens_end_a_branch(harness: Harness) -> None:
    [free] = harness.complete(generate(PROMPT, [Branch(4, 4, 60)], **LAW))
    chosen = free.token_ids[10]
    place = free.token_ids.index(chosen)
    request = generate(PROMPT, [Branch(4, 4, 60)], stop_token_ids=(chosen,), **LAW)
    [stopped] = harness.complete(request)
    assert stopped.token_ids == free.token_ids[: place + 1]
    assert (stopped.finish_reason, stopped.stop) == ("stop", chosen)
    assert free.text.startswith(stopped.text)


def test_an_end_of_sequence_token_counts_as_usage_but_is_not_text(harness: Harness) -> None:
    harness.core.model._eos = frozenset({harness.complete(generate(PROMPT, [Branch(4, 4, 9)], **LAW))[0].token_ids[6]})
    law = LAW | {"ignore_eos": False}
    [completion] = harness.complete(generate(PROMPT, [Branch(4, 4, 60)], **law))
    [eos] = harness.core.model._eos
    assert (completion.finish_reason, completion.stop, completion.token_ids[-1]) == ("stop", eos, eos)
    assert completion.text == harness.core.model.tokenizer.decode(completion.token_ids[:-1]).rstrip("\ufffd")


def test_abort_returns_what_was_generated_and_frees_everything(harness: Harness) -> None:
    events = harness.submit(generate(PROMPT, [Branch(1, key, 100) for key in range(3)], **LAW))
    for _ in range(6):
        harness.core.step()
    harness.core.cancel(lambda job: job.request_id == "r")
    completions = [event for event in events if isinstance(event, Completion)]
    assert {completion.finish_reason for completion in completions} == {"cancelled"}
    assert completions[0].token_ids == harness.complete(generate(PROMPT, [Branch(1, 0, 6)], **LAW))[0].token_ids
    harness.core.cache.check()
    assert not harness.core.has_work
    assert harness.core.cache.num_available_pages == harness.core.cache.pool.size


def test_an_expired_request_ends_at_the_next_step_with_what_it_has(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = harness.submit(generate(PROMPT, [Branch(1, 1, 100)], **LAW), deadline=50.0)
    now = 0.0
    monkeypatch.setattr("engine.core.engine_core.time", SimpleNamespace(monotonic=lambda: now))
    harness.core.step()
    now = 50.0
    harness.core.step()
    [completion] = [event for event in events if isinstance(event, Completion)]
    assert (completion.finish_reason, len(completion.token_ids)) == ("timeout", 1)


def test_a_deadline_that_passes_while_a_request_waits_ends_it_without_a_token(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(checkpoints("qwen3"), EngineOptions(kv_tokens=256, max_running=1, step_tokens=64))
    monkeypatch.setattr("engine.core.engine_core.time", SimpleNamespace(monotonic=lambda: 20.0))
    harness.submit(generate(PROMPT, [Branch(1, 1, 20)], **LAW))
    harness.core.step()
    late = harness.submit(generate(PROMPT, [Branch(1, 1, 5)], **LAW), deadline=20.0)
    kept = harness.submit(generate(PROMPT, [Branch(1, 1, 5)], **LAW), deadline=20.5)
    harness.core.step()
    [completion] = [event for event in late if isinstance(event, Completion)]
    assert (completion.finish_reason, completion.token_ids, completion.cached_tokens) == ("timeout", (), 0)
    harness.run()
    [completion] = [event for event in kept if isinstance(event, Completion)]
    assert completion.finish_reason == "length"


def test_a_prompt_larger_than_the_pool_is_rejected_with_the_limit(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"), EngineOptions(kv_tokens=64, max_running=4, step_tokens=64))
    with pytest.raises(InvalidRequest, match="at most 63") as refusal:
        harness.submit(generate([5] * 64, [Branch(1, 1, 1)]))
    assert refusal.value.field == "prompt"


def test_a_branch_has_the_same_tokens_whatever_its_priority_pin_key_and_namespace(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"), EngineOptions(kv_tokens=320, max_running=8, step_tokens=64))
    requests = [
        generate(PROMPT, [Branch(5, key, 40)], priority=key % 3, pin_key=f"job-{key % 2}", cache_salt=salt, **LAW)
        for key in range(8)
        for salt in (None, "a")
    ]
    answers = [harness.submit(request) for request in requests]
    harness.run()
    assert harness.core.stats.preemptions > 0
    for request, events in zip(requests, answers, strict=True):
        [completion] = [event for event in events if isinstance(event, Completion)]
        same_as_alone(checkpoints, request.branches, [completion.token_ids])


def test_a_failing_step_fails_its_requests_and_the_engine_continues(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, checkpoints: Checkpoints
) -> None:
    failed = harness.submit(generate(PROMPT, [Branch(1, 1, 10)], **LAW))
    with monkeypatch.context() as patch:
        patch.setattr("engine.core.step.sample_and_score", lambda *_, **__: 1 / 0)
        harness.run()
    [error] = failed
    assert isinstance(error, EngineError)
    assert "ZeroDivisionError" in str(error)
    [completion] = harness.complete(generate(PROMPT, [Branch(1, 1, 10)], **LAW))
    same_as_alone(checkpoints, [Branch(1, 1, 10)], [completion.token_ids])


def test_a_stream_adds_up_to_the_completion(harness: Harness) -> None:
    request = generate(PROMPT, [Branch(1, key, 60) for key in range(4)], stop=("e\n", "!!"), **LAW)
    events = harness.submit(request, stream=True)
    harness.run()
    for completion in [event for event in events if isinstance(event, Completion)]:
        deltas = [event for event in events if isinstance(event, Delta) and event.index == completion.index]
        assert "".join(delta.text for delta in deltas) == completion.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == completion.token_ids


def test_texts_of_a_cut_branch_add_up_to_the_text_of_the_whole(harness: Harness) -> None:
    [whole] = harness.complete(generate(PROMPT, [Branch(9, 2, 24)], **LAW))
    firsts = harness.complete(generate(PROMPT, [Branch(9, 2, cut) for cut in range(1, 24)], **LAW))
    rests = [Branch(9, 2, 24 - len(first.token_ids), first.token_ids) for first in firsts]
    seconds = harness.complete(generate(PROMPT, rests, **LAW))
    assert {first.text + second.text for first, second in zip(firsts, seconds, strict=True)} == {whole.text}


@pytest.mark.parametrize(
    "asked",
    [
        generate([5, 6, 7], [Branch(1, 1, 3)]),
        generate([5, 6, 7], [Branch(1, 1, 0)], prompt_logprobs=0),
        score(ScoreItem(((5, 6, 7),), (0,)), token_ids=(3, 4)),
    ],
)
def test_nan_logits_fail_the_request(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, asked: GenerateRequest | ScoreRequest
) -> None:
    harness = Harness(checkpoints("qwen3"))
    monkeypatch.setattr(harness.core.model.decoder, "_norm", torch.full((48,), torch.nan))
    events = harness.submit(asked)
    harness.run()
    assert "not finite" in str(events)
    assert all(isinstance(event, EngineError) for event in events)


def test_a_score_request_computes_nothing_over_max_compute(harness: Harness, checkpoints: Checkpoints) -> None:
    item = ScoreItem((PROMPT,), (0,))
    scored = harness.core.stats.scored_tokens
    [declined] = harness.score(score(item, token_ids=(1,), max_compute=len(PROMPT) - 1))
    assert (declined.values, declined.computed_tokens) == (None, len(PROMPT))
    assert harness.core.stats.scored_tokens == scored
    [done] = harness.score(score(item, token_ids=(1,), max_compute=len(PROMPT)))
    assert done.values is not None
    [again] = harness.score(score(item, token_ids=(1,), max_compute=1))
    assert again.values is not None
    assert again.values[0] == pytest.approx(done.values[0], abs=2 * float32_loss(checkpoints("qwen3")).logit)
    assert (again.computed_tokens, again.cached_tokens) == (1, len(PROMPT) - 1)


def test_text_parts_are_tokenised_apart_and_scored_at_their_ends(harness: Harness, checkpoints: Checkpoints) -> None:
    encode = harness.core.model.tokenizer.encode
    parts = ("step one: ", "add 3", " and 4", " unread tail")
    ids = [encode(part) for part in parts]
    [by_text] = harness.score(score(ScoreItem(parts, (2, 0)), token_ids=(4, 5)))
    [by_ids] = harness.score(score(ScoreItem(tuple(ids), (2, 0)), token_ids=(4, 5)))
    bound = 2 * float32_loss(checkpoints("qwen3")).logit
    torch.testing.assert_close(torch.tensor(by_text.values), torch.tensor(by_ids.values), atol=bound, rtol=0)
    assert by_text.computed_tokens == sum(map(len, ids[:3]))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (generate([], [Branch(1, 1, 1)]), "prompt"),
        (generate([400], [Branch(1, 1, 1)]), "prompt"),
        (generate([-1], [Branch(1, 1, 1)]), "prompt"),
        (generate([5] * 256, [Branch(1, 1, 1)]), "prompt"),
        (generate([5], []), "branches"),
        (generate([5], [Branch(1, 1, 1)] * 9999), "branches"),
        (generate([5], [Branch(1, 1, 1, (999,))]), "branches.generated"),
        (generate([5], [Branch(1, 1, 0)]), "max_tokens"),
        (generate([5], [Branch(1 << 64, 1, 1)]), "seed"),
        (generate([5], [Branch(1, 1 << 64, 1)]), "key"),
        (generate([5], [Branch(1, 1, 1)], temperature=-1.0), "temperature"),
        (generate([5], [Branch(1, 1, 1)], temperature=float("nan")), "temperature"),
        (generate([5], [Branch(1, 1, 1)], top_k=-1), "top_k"),
        (generate([5], [Branch(1, 1, 1)], top_p=0.0), "top_p"),
        (generate([5], [Branch(1, 1, 1)], min_p=1.5), "min_p"),
        (generate([5], [Branch(1, 1, 1)], stop=("",)), "stop"),
        (generate([5], [Branch(1, 1, 1)], stop_token_ids=(4000,)), "stop_token_ids"),
        (generate([5], [Branch(1, 1, 1)], timeout=0.0), "timeout"),
        (score(ScoreItem(("a",), (0,))), "token_ids"),
        (score(ScoreItem(("a",), (0,)), token_ids=(400,)), "token_ids"),
        (score(ScoreItem(("a",), (1,)), token_ids=(1,)), "items.read"),
        (score(ScoreItem(("a",), ()), token_ids=(1,)), "items.read"),
        (score(ScoreItem(("",), (0,)), token_ids=(1,)), "items.read"),
        (score(ScoreItem(((400,),), (0,)), token_ids=(1,)), "items.parts"),
        (score(ScoreItem(((5,) * 257,), (0,)), token_ids=(1,)), "items.parts"),
        (score(ScoreItem(("a",), (0,)), token_ids=(1,), max_compute=-1), "max_compute"),
    ],
)
def test_an_impossible_request_is_rejected_with_its_field(harness: Harness, request_: object, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        harness.submit(request_)  # type: ignore[arg-type]
    assert refusal.value.field == field
    assert not harness.core.has_work


def test_classifiers_reject_generation_and_language_models_classification(checkpoints: Checkpoints) -> None:
    classifier = Harness(checkpoints("qwen3_classify"), SMALL)
    with pytest.raises(InvalidRequest, match="cannot generate"):
        classifier.submit(generate(PROMPT, [Branch(1, 1, 1)]))
    with pytest.raises(InvalidRequest, match="token_ids must be empty"):
        classifier.submit(score(ScoreItem((PROMPT,), (0,)), token_ids=(1,)))
