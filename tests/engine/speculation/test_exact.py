"""Speculative decoding returns exactly the results of plain decoding, for every kind of request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.device import KV_DTYPES
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, Delta, GenerateRequest, ScoreItem, TokenLogprob
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import Event
from engine.speculation.control.controller import FixedController
from engine.speculation.verify import find_accepted
from tests.engine.conftest import Checkpoints
from tests.engine.exact import gap
from tests.engine.helpers import SMALL, Harness, generate, qwen3_for, score
from tests.engine.speculation.stub_drafters import Oracle, Place
from tests.engine.ties import count_same_tokens
from tests.long import mostly_long_grid
from tests.seeds import shift

VOCAB = 360
PROMPTS = [random.Random(shift(length)).choices(range(3, VOCAB), k=length) for length in (3, 17, 40, 61)]
LAWS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "filters": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.7,
        "logit_bias": ((7, 2.0), (9, -3.0)),
    },
    "limits": {"temperature": 1.2, "min_tokens": 9, "stop_token_ids": tuple(range(3, 60))},
    "stops": {"temperature": 1.0, "stop": ("a", "step", "e t")},
    "logprobs": {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 2},
}
READ = score(ScoreItem((tuple(PROMPTS[3]),), (0,)), token_ids=(7,))
SHAPES = {"chain": (5, 5), "tree": (4, 12)}


def requests(law: str, length: int = 24, namespace: str | None = None) -> list[GenerateRequest]:
    ignoring = {"ignore_eos": law != "limits"}
    branches = [Branch(seed=11, key=key, max_tokens=length - 3 * key) for key in range(4)]
    return [
        generate(prompt, branches, request_id=f"{law} {number}", cache_salt=namespace, **{**ignoring, **LAWS[law]})
        for number, prompt in enumerate(PROMPTS)
    ]


def answers(harness: Harness, asked: Sequence[GenerateRequest], *, stream: bool = False) -> list[list[Event]]:
    heard = [harness.submit(request, stream=stream) for request in asked]
    harness.run()
    return heard


def completions(heard: Sequence[Sequence[Event]]) -> list[Completion]:
    found = [sorted((e for e in events if isinstance(e, Completion)), key=lambda one: one.index) for events in heard]
    assert all(len(some) == 4 for some in found)
    return [one for some in found for one in some]


def truth(asked: Sequence[GenerateRequest], plain: Sequence[Completion]) -> dict[Place, int]:
    """Return the token that each branch samples at each position."""
    branches = [(request, branch) for request in asked for branch in request.branches]
    return {
        (branch.seed, branch.key, len(request.prompt) + len(branch.generated) + place): token
        for (request, branch), completion in zip(branches, plain, strict=True)
        for place, token in enumerate(completion.token_ids)
    }


def same(
    asked: Sequence[GenerateRequest],
    ours: Sequence[Completion],
    plain: Sequence[Completion],
    folder: Path,
    kv_dtype: str = "auto",
) -> None:
    """Check equality up to ties and roundings of different steps, at most doubled: all temperatures of ``LAWS`` exceed
    1/2.
    """
    bound = gap(folder, kv_dtype)
    branches = [(request, branch) for request in asked for branch in request.branches]
    for (request, branch), one, other in zip(branches, ours, plain, strict=True):
        count = count_same_tokens(folder, request, branch, one.token_ids, other.token_ids, kv_dtype)
        if count == len(one.token_ids):
            assert (one.text, one.finish_reason, one.stop) == (other.text, other.finish_reason, other.stop)
            assert one.logprob == pytest.approx(other.logprob, abs=2 * count * bound)
        for ours_at, plain_at in list(zip(one.logprobs or (), other.logprobs or (), strict=False))[:count]:
            same_logprobs(ours_at, plain_at, bound)
        for ours_at, plain_at in zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
            assert (ours_at is None) == (plain_at is None)
            if ours_at and plain_at:
                same_logprobs(ours_at, plain_at, bound)


def same_logprobs(ours: TokenLogprob, plain: TokenLogprob, bound: float) -> None:
    """Check the log-probabilities at one position; the likeliest tokens may change places within the bound."""
    assert ours.token_id == plain.token_id
    assert ours.logprob == pytest.approx(plain.logprob, abs=bound)
    assert [value for _, value in ours.top] == pytest.approx([value for _, value in plain.top], abs=bound)
    known = dict(plain.top)
    for token, value in ours.top:
        assert value == pytest.approx(known.get(token, plain.top[-1][1]), abs=bound)


def speculating(folder: Path, oracle: Oracle, shape: str, options: EngineOptions = SMALL) -> Harness:
    harness = Harness(folder, options)
    harness.core.start_speculation(oracle, FixedController(*SHAPES[shape]))
    return harness


@pytest.mark.parametrize(("shape", "law"), mostly_long_grid(list(SHAPES), list(LAWS), every=3))
def test_every_kind_of_request_is_answered_as_without_drafts(checkpoints: Checkpoints, law: str, shape: str) -> None:
    folder = checkpoints("qwen3")
    asked = requests(law)
    plain = completions(answers(Harness(folder), asked))
    accepted_at = {}
    for right in (0.0, 0.6, 1.0):
        oracle = Oracle(truth(asked, plain), VOCAB, right)
        harness = speculating(folder, oracle, shape)
        ours = completions(answers(harness, asked))
        same(asked, ours, plain, folder)
        accepted_at[right] = harness.core.speculation_stats.accepted
        assert harness.core.speculation_stats.drafted == sum(one.drafted_tokens for one in ours)
        assert accepted_at[right] == sum(one.accepted_tokens for one in ours)
        assert not oracle.known
    assert accepted_at[0.0] < accepted_at[0.6] < accepted_at[1.0]
    tokens = sum(len(one.token_ids) for one in plain)
    assert accepted_at[1.0] > 0.5 * tokens


def test_a_request_without_speculation_gets_no_drafts_beside_others(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    asked = requests("plain")
    plain = completions(answers(Harness(folder), asked))
    harness = speculating(folder, Oracle(truth(asked, plain), VOCAB, 1.0), "chain")
    heard = answers(harness, [replace(request, draft=number % 2 == 0) for number, request in enumerate(asked)])
    same(asked, completions(heard), plain, folder)
    for number, events in enumerate(heard):
        assert all((one.drafted_tokens > 0) == (number % 2 == 0) for one in completions([events]))


@pytest.mark.parametrize(
    ("shape", "family"),
    mostly_long_grid(list(SHAPES), ["mistral", "gemma2", "gemma3", "mixtral", "phi3", "gpt2"], every=5),
)
def test_windows_soft_caps_experts_and_transformers_models_speculate_exactly(
    checkpoints: Checkpoints, family: str, shape: str
) -> None:
    folder = checkpoints(family)
    asked = requests("plain")
    plain = completions(answers(Harness(folder), asked))
    harness = speculating(folder, Oracle(truth(asked, plain), VOCAB, 0.7), shape)
    same(asked, completions(answers(harness, asked)), plain, folder)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_streams_add_up_to_the_same_text(checkpoints: Checkpoints, shape: str) -> None:
    folder = checkpoints("qwen3")
    asked = requests("stops")
    plain = answers(Harness(folder), asked, stream=True)
    harness = speculating(folder, Oracle(truth(asked, completions(plain)), VOCAB, 0.8), shape)

    def streamed(heard: list[list[Event]]) -> list[tuple[str, tuple[int, ...]]]:
        deltas = [[e for e in events if isinstance(e, Delta)] for events in heard]
        return [
            (
                "".join(delta.text for delta in some if delta.index == index),
                tuple(token for delta in some if delta.index == index for token in delta.token_ids),
            )
            for some in deltas
            for index in range(4)
        ]

    assert streamed(answers(harness, asked, stream=True)) == streamed(plain)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_preemption_in_a_small_pool_changes_no_token(checkpoints: Checkpoints, shape: str) -> None:
    folder = checkpoints("qwen3")
    asked = [replace(request, pin_key="a") for request in requests("plain", 40)]
    plain = completions(answers(Harness(folder), asked))
    tight = EngineOptions(kv_tokens=160, page_size=8, max_running=6, step_tokens=24)
    harness = speculating(folder, Oracle(truth(asked, plain), VOCAB, 0.7), shape, tight)
    read = [harness.submit(READ) for _ in range(2)]
    same(asked, completions(answers(harness, asked)), plain, folder)
    assert harness.core.stats.preemptions > 0
    assert all(len(events) == 1 for events in read)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_prefix_generated_with_drafts_is_a_cache_hit(checkpoints: Checkpoints, kv_dtype: str) -> None:
    """Only committed tokens are cached: every generated token is found, and no rejected draft token."""
    folder, options = checkpoints(qwen3_for(kv_dtype)), replace(SMALL, kv_dtype=kv_dtype)
    asked = requests("plain")
    plain_harness = Harness(folder, options)
    plain = completions(answers(plain_harness, asked))
    harness = speculating(folder, Oracle(truth(asked, plain), VOCAB, 0.5), "tree", options)
    answers(harness, asked)
    again = [
        replace(
            request,
            branches=tuple(Branch(3, key, 2, one.token_ids) for key, one in enumerate(plain[4 * n : 4 * n + 4])),
        )
        for n, request in enumerate(asked)
    ]
    expected = completions(answers(plain_harness, again))
    found = completions(answers(harness, again))
    same(again, found, expected, folder, kv_dtype)
    assert [one.cached_tokens for one in found] == [one.cached_tokens for one in expected]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_in_deterministic_mode_speculation_gives_the_same_bits(checkpoints: Checkpoints, kv_dtype: str) -> None:
    folder = checkpoints(qwen3_for(kv_dtype))
    options = replace(SMALL, deterministic=True, kv_dtype=kv_dtype)
    asked = requests("logprobs")
    plain = completions(answers(Harness(folder, options), asked))
    harness = speculating(folder, Oracle(truth(asked, plain), VOCAB, 0.7), "tree", options)
    ours = completions(answers(harness, asked))
    assert harness.core.runner.speculator is not None
    assert harness.core.speculation_stats.accepted > 0
    assert [replace(one, drafted_tokens=0, accepted_tokens=0) for one in ours] == plain


def test_a_cancelled_branch_returns_its_tokens_and_is_released(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    asked = requests("plain")
    plain = completions(answers(Harness(folder), asked))
    oracle = Oracle(truth(asked, plain), VOCAB, 0.8)
    harness = speculating(folder, oracle, "tree")
    heard = [harness.submit(request) for request in asked]
    for _ in range(3):
        harness.core.step()
    harness.core.cancel(lambda job: job.request_id == asked[0].request_id)
    harness.run()
    cut = completions(heard)
    for one, other in zip(cut[:4], plain[:4], strict=True):
        assert one.finish_reason == "cancelled"
        assert one.token_ids == other.token_ids[: len(one.token_ids)]
    same(asked[1:], cut[4:], plain[4:], folder)
    assert not oracle.known
    harness.submit(asked[0])
    for _ in range(3):
        harness.core.step()
    assert oracle.known
    harness.core.cancel(lambda _: True)
    assert not harness.core.has_work
    assert not oracle.known


def test_the_accepted_path_is_the_longest_that_equals_the_samples() -> None:
    draft = Draft((5, 6, 7, 8, 6), (-1, 0, 0, 2, -1), (1.0,) * 5)
    assert find_accepted(draft, [5, 7, 0, 8, 1, 0]) == (0, 2, 3)
    assert find_accepted(draft, [5, 6, 8, 0, 0, 0]) == (0, 1)
    assert find_accepted(draft, [6, 0, 0, 0, 0, 9]) == (4,)
    assert find_accepted(draft, [9, 6, 6, 6, 6, 6]) == ()
