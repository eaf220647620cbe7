"""Calls of our client to vLLM and their results beside those of our engine on the same checkpoints.

``make test-vllm`` makes them on a real server and writes down its answers; the ordinary tests make them on those.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import (
    Branch,
    Capability,
    Completion,
    EngineClient,
    EngineError,
    InvalidRequest,
    ScoreItem,
    TokenizeRequest,
)
from engine.remote.http import HttpEngine
from prm.formats.registry import FORMAT_NOTE
from prm.scorers.next_turn import encode_next_turn
from tests.engine.helpers import generate, score

BUNDLED = Path(__file__).parents[3] / "reasoner" / "bundled"
RECORDED = Path(__file__).parent / "recorded"
QUESTION = [{"role": "user", "content": "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45."}]
TOLERANCE = 1e-3
"""Both compute in float32, whose rounding is a hundredth of this; a wrong token or position differs by whole units."""
_BLOCK_TOKENS = 32
"""The size of the servers' blocks of cached tokens."""
_MODELS = {"policy": "policy", "prm": "prm", "last": "prm"}
"""The bundled models by server."""
Case = Callable[[HttpEngine, LocalEngine], Awaitable[None]]


def connect(url: str, server: str) -> HttpEngine:
    return HttpEngine(url, tokenizer=BUNDLED / _MODELS[server])


def our_engine(server: str) -> LocalEngine:
    model = _MODELS[server]
    return LocalEngine({model: BUNDLED / model}, EngineOptions(kv_tokens=4096))


async def collect(
    engine: EngineClient, prompt: tuple[int, ...], *branches: Branch, **sampling: object
) -> list[Completion]:
    request = generate(prompt, branches, model="policy", **sampling)  # type: ignore[arg-type]
    events = [event async for event in engine.generate(request)]
    return sorted((event for event in events if isinstance(event, Completion)), key=lambda one: one.index)


async def lists_the_model(vllm: HttpEngine, ours: LocalEngine) -> None:
    [theirs], [expected] = await vllm.models(), await ours.models()
    assert (theirs.id, theirs.kind, theirs.context) == ("policy", "generate", expected.context)
    assert (theirs.vocab_size, theirs.architecture) == (expected.vocab_size, expected.architecture)
    assert theirs.parameters == expected.parameters
    assert theirs.extra["server"] == "vllm"
    assert theirs.counts_exactly
    assert set(Capability) - theirs.capabilities == {
        "constraint_continuation",
        "kv_budget",
        "penalty_continuation",
    }


async def tokenizes_like_our_engine(vllm: HttpEngine, ours: LocalEngine) -> None:
    for text in (QUESTION, "3 + 4 = 7\n\n"):
        assert await vllm.tokenize(TokenizeRequest("policy", text)) == await ours.tokenize(
            TokenizeRequest("policy", text)
        )


async def decodes_greedily_like_our_engine(vllm: HttpEngine, ours: LocalEngine) -> None:
    prompt = await ours.tokenize(TokenizeRequest("policy", QUESTION))
    [theirs] = await collect(vllm, prompt, Branch(1, 1, 80), temperature=0.0)
    [expected] = await collect(ours, prompt, Branch(1, 1, 80), temperature=0.0)
    assert (theirs.token_ids, theirs.text) == (expected.token_ids, expected.text)
    assert (theirs.finish_reason, theirs.stop) == (expected.finish_reason, expected.stop)
    assert theirs.prompt_tokens == len(prompt)


async def continues_a_cut_branch(vllm: HttpEngine, ours: LocalEngine) -> None:
    prompt = await ours.tokenize(TokenizeRequest("policy", QUESTION))
    [whole] = await collect(ours, prompt, Branch(1, 1, 40), temperature=0.0)
    [first] = await collect(vllm, prompt, Branch(1, 1, 7), temperature=0.0)
    [second] = await collect(vllm, prompt, Branch(1, 1, 33, first.token_ids), temperature=0.0)
    assert first.finish_reason == "length"
    assert first.token_ids + second.token_ids == whole.token_ids


async def gives_siblings_the_samples_of_single_requests(vllm: HttpEngine, ours: LocalEngine) -> None:
    prompt = await ours.tokenize(TokenizeRequest("policy", QUESTION))
    branches = [Branch(3, 100 + index, 24, (), (9, index)) for index in range(4)]
    together = await collect(vllm, prompt, *branches)
    alone = [(await collect(vllm, prompt, branch))[0] for branch in branches]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert len({one.token_ids for one in together}) > 1
    assert sum(one.prompt_tokens - one.cached_tokens for one in together) <= len(prompt) + 3


async def keeps_a_stop_string_in_text_and_tokens(vllm: HttpEngine, ours: LocalEngine) -> None:
    prompt = await ours.tokenize(TokenizeRequest("policy", QUESTION))
    [theirs] = await collect(vllm, prompt, Branch(1, 1, 60), temperature=0.0, stop=("=",))
    [expected] = await collect(ours, prompt, Branch(1, 1, 60), temperature=0.0, stop=("=",))
    assert (theirs.finish_reason, theirs.stop) == ("stop", "=")
    assert (theirs.token_ids, theirs.text) == (expected.token_ids, expected.text)


async def reports_log_probabilities(vllm: HttpEngine, ours: LocalEngine) -> None:
    prompt = await ours.tokenize(TokenizeRequest("policy", QUESTION))
    [theirs] = await collect(vllm, prompt, Branch(1, 1, 8), temperature=0.0, logprobs=3)
    [expected] = await collect(ours, prompt, Branch(1, 1, 8), temperature=0.0, logprobs=3)
    assert theirs.logprob == pytest.approx(expected.logprob, abs=TOLERANCE)
    assert theirs.logprobs is not None
    assert expected.logprobs is not None
    for one, other in zip(theirs.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)


async def reads_verdicts_however_unlikely(vllm: HttpEngine, ours: LocalEngine) -> None:
    """The difference of two verdicts is that of their logits. The first is the likeliest, the other hardly possible."""
    prompt = await ours.tokenize(TokenizeRequest("policy", QUESTION))
    [best] = await collect(ours, prompt, Branch(1, 1, 1), temperature=0.0)
    verdicts = (best.token_ids[0], (await ours.tokenize(TokenizeRequest("policy", "7")))[0])
    request = score(ScoreItem((prompt,), (0,)), model="policy", token_ids=verdicts)
    [theirs], [expected] = await vllm.score(request), await ours.score(request)
    assert theirs.values is not None
    assert expected.values is not None
    [[first, second]], [[likely, unlikely]] = theirs.values, expected.values
    assert first - second == pytest.approx(likely - unlikely, abs=TOLERANCE)
    assert first > -1.5


async def reads_twenty_grades_behind_a_branch(vllm: HttpEngine, ours: LocalEngine) -> None:
    """All log-probabilities are exact, not only those of the likeliest, and the branch's blocks are in the cache."""
    prompt = await ours.tokenize(TokenizeRequest("policy", QUESTION))
    [branch] = await collect(vllm, prompt, Branch(1, 1, 80), temperature=0.0)
    question = await encode_next_turn(ours, "policy", "Grade this solution.", {})
    graded = prompt + branch.token_ids + question
    asked = score(ScoreItem((graded,), (0,)), model="policy", token_ids=tuple(range(100, 120)))
    request = replace(asked, normalized=True)
    [theirs], [expected] = await vllm.score(request), await ours.score(request)
    assert theirs.values is not None
    assert expected.values is not None
    assert theirs.values[0] == pytest.approx(expected.values[0], abs=TOLERANCE)
    assert len(set(theirs.values[0])) == 20
    assert theirs.computed_tokens + theirs.cached_tokens == len(graded) + 1  # one is sampled
    written = len(prompt) + len(branch.token_ids) - 1
    assert written - _BLOCK_TOKENS < theirs.cached_tokens <= written


async def reports_cached_tokens_until_the_cache_is_cleared(vllm: HttpEngine, ours: LocalEngine) -> None:
    prompt = (await ours.tokenize(TokenizeRequest("policy", QUESTION))) * 2
    await collect(vllm, prompt, Branch(1, 1, 2))
    [warm] = await collect(vllm, prompt, Branch(1, 2, 2))
    assert 0 < warm.cached_tokens < len(prompt)
    await vllm.clear_cache()
    [cold] = await collect(vllm, prompt, Branch(1, 3, 2))
    assert cold.cached_tokens == 0


async def names_what_was_wrong_with_a_request(vllm: HttpEngine, ours: LocalEngine) -> None:
    prompt = await ours.tokenize(TokenizeRequest("policy", QUESTION))
    with pytest.raises(EngineError, match="999999"):
        await collect(vllm, prompt, Branch(1, 1, 4, (999_999,)))
    with pytest.raises(InvalidRequest, match="context length"):
        await collect(vllm, prompt * 60, Branch(1, 1, 4))
    with pytest.raises(EngineError, match="nowhere"):
        async for _ in vllm.generate(generate(prompt, [Branch(1, 1, 4)], model="nowhere")):
            pass


async def knows_a_reward_model(vllm: HttpEngine, ours: LocalEngine) -> None:
    [theirs], [expected] = await vllm.models(), await ours.models()
    assert (theirs.id, theirs.kind, theirs.architecture) == ("prm", "classify", expected.architecture)
    assert theirs.extra.get(FORMAT_NOTE) == expected.extra.get(FORMAT_NOTE)


async def scores_like_our_engine(vllm: HttpEngine, ours: LocalEngine) -> None:
    steps = ("12 - 7 = 5\n\n", "8 * 5 = 40\n\n", "3 + 40 = 43\n\n")
    parts = [await ours.tokenize(TokenizeRequest("prm", part, special=False)) for part in steps]
    prompt = await ours.tokenize(TokenizeRequest("prm", "Use the numbers 3, 7, 8 and 12 to reach 45.\n\n"))
    request = score(ScoreItem((prompt, *parts), (1, 2, 3)), model="prm")
    [theirs], [expected] = await vllm.score(request), await ours.score(request)
    assert theirs.values is not None
    assert expected.values is not None
    for one, other in zip(theirs.values, expected.values, strict=True):
        assert one == pytest.approx(other, abs=TOLERANCE)
    two, whole = (len(prompt) + sum(map(len, parts[:count])) for count in (2, 3))
    assert theirs.computed_tokens + theirs.cached_tokens == two + whole  # the first tells that every token has a row
    [theirs] = await vllm.score(request)
    assert theirs.computed_tokens + theirs.cached_tokens == whole


async def scores_one_position_like_our_engine(vllm: HttpEngine, ours: LocalEngine) -> None:
    prompt = await ours.tokenize(
        TokenizeRequest("prm", "Use the numbers 3, 7, 8 and 12 to reach 45.\n\n12 - 7 = 5\n\n")
    )
    request = score(ScoreItem((prompt,), (0,)), model="prm")
    [theirs], [expected] = await vllm.score(request), await ours.score(request)
    assert theirs.values is not None
    assert expected.values is not None
    assert theirs.values[0] == pytest.approx(expected.values[0], abs=TOLERANCE)


async def scores_several_positions_like_our_engine(vllm: HttpEngine, ours: LocalEngine) -> None:
    prompt = await ours.tokenize(TokenizeRequest("prm", "Use the numbers 3, 7, 8 and 12 to reach 45.\n\n"))
    step = await ours.tokenize(TokenizeRequest("prm", "12 - 7 = 5\n\n", special=False))
    request = score(ScoreItem((prompt, step, step), (1, 2)), model="prm")
    [theirs], [expected] = await vllm.score(request), await ours.score(request)
    assert theirs.values is not None
    assert expected.values is not None
    for one, other in zip(theirs.values, expected.values, strict=True):
        assert one == pytest.approx(other, abs=TOLERANCE)
    assert theirs.computed_tokens + theirs.cached_tokens == 2 * len(prompt) + 3 * len(step)


CASES: dict[str, tuple[Case, ...]] = {
    "policy": (
        lists_the_model,
        tokenizes_like_our_engine,
        decodes_greedily_like_our_engine,
        continues_a_cut_branch,
        gives_siblings_the_samples_of_single_requests,
        keeps_a_stop_string_in_text_and_tokens,
        reports_log_probabilities,
        reads_verdicts_however_unlikely,
        reads_twenty_grades_behind_a_branch,
        reports_cached_tokens_until_the_cache_is_cleared,
        names_what_was_wrong_with_a_request,
    ),
    "prm": (knows_a_reward_model, scores_like_our_engine),
    "last": (scores_one_position_like_our_engine, scores_several_positions_like_our_engine),
}
"""The cases by their server: the policy, the PRM with a row for each token, and the PRM with one for the last."""


def parameters() -> list[object]:
    """Return the parameters of a test: each case with its server."""
    return [pytest.param(server, case, id=case.__name__) for server, cases in CASES.items() for case in cases]


def recording(case: Case) -> Path:
    """Return the file with the answers to a case."""
    return RECORDED / f"{case.__name__}.json"
