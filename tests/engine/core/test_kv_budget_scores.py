"""Scores behind a branch that lost pages go on from the keys that the branch has left."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, InvalidRequest, KeyBound, ScoreItem, ScoreResult
from tests.engine.adapters.lora import INVOCATION, create_harness, save_adapter
from tests.engine.conftest import Checkpoints
from tests.engine.core.test_kv_budget import BUDGET, KINDS, LAW, PROMPT, PURE, exact_bounded_logprobs
from tests.engine.exact import float32_loss
from tests.engine.helpers import Harness, generate, score
from tests.long import mostly_long
from tests.seeds import shift

BOUND = KeyBound(BUDGET, len(PROMPT), seed=5)
BRANCH = Branch(seed=5, key=0, max_tokens=130)
QUESTION = tuple(random.Random(shift(7)).choices(range(3, 360), k=12))


def write(harness: Harness, length: int = 130, pin_key: str | None = "job") -> tuple[int, ...]:
    """Let a branch write; return all of its tokens."""
    [done] = harness.complete(generate(PROMPT, [replace(BRANCH, max_tokens=length)], pin_key=pin_key, **LAW))
    assert done.dropped_tokens
    return (*PROMPT, *done.token_ids)


def ask(
    harness: Harness,
    tokens: tuple[int, ...],
    bound: KeyBound | None = BOUND,
    model: str = "m",
    max_compute: int | None = None,
) -> ScoreResult:
    """Return the scores of two tokens behind some tokens, for the job that wrote them."""
    item = ScoreItem((tokens,), (0,), bound)
    [result] = harness.score(score(item, model=model, token_ids=(5, 6), max_compute=max_compute, pin_key="job"))
    return result


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=2))
def test_a_question_behind_a_branch_computes_its_own_tokens_and_changes_no_bit(
    checkpoints: Checkpoints, kind: str
) -> None:
    folder = checkpoints(kind)
    harness = Harness(folder, PURE)
    branch = write(harness)
    for question in (QUESTION, QUESTION[::-1]):
        tokens = (*branch, *question)
        found, alone = ask(harness, tokens), ask(Harness(folder, PURE), tokens)
        assert (found.computed_tokens, found.cached_tokens) == (1 + len(question), len(branch) - 1)
        assert alone.cached_tokens == 0
        assert found.values == alone.values
        assert found.values != ask(Harness(folder, PURE), tokens, None).values
    # The branch goes on as if nobody had asked, and no question is kept.
    assert len(harness.core.cache.retained) == 1
    rest = generate(branch, [replace(BRANCH, max_tokens=40)], pin_key="job", kv_start=len(PROMPT), **LAW)
    [more], [expected] = harness.complete(rest), Harness(folder, PURE).complete(rest)
    assert (more.token_ids, more.cached_tokens) == (expected.token_ids, len(branch) - 1)
    harness.core.release("job")
    assert harness.core.cache.num_available_pages == harness.core.cache.pool.size


@pytest.mark.parametrize("case", range(3))
def test_a_score_is_that_of_a_model_with_the_dropped_keys_masked(checkpoints: Checkpoints, case: int) -> None:
    folder = checkpoints("qwen3")
    tokens = tuple(random.Random(shift(case)).choices(range(3, 360), k=170 + 9 * case))
    bound = KeyBound(BUDGET, 20 + 11 * case, seed=case)
    request = replace(score(ScoreItem((tokens,), (0,), bound), token_ids=(5, 6)), normalized=True)
    [result] = Harness(folder).score(request)
    expected = exact_bounded_logprobs(folder, tokens, bound)[-1]
    assert result.values is not None
    for token, value in zip((5, 6), result.values[0], strict=True):
        assert abs(value - float(expected[token])) <= float32_loss(folder).logprob


def test_questions_between_the_steps_of_a_branch_change_no_bit_of_it(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    [whole] = Harness(folder, PURE).complete(generate(PROMPT, [replace(BRANCH, max_tokens=200)], **LAW))
    harness, written = Harness(folder, PURE), tuple[int, ...]()
    for length in (90, 1, 15, 31, 63):
        part = replace(BRANCH, max_tokens=length, generated=written)
        [done] = harness.complete(generate(PROMPT, [part], pin_key="job", **LAW))
        written += done.token_ids
        result = ask(harness, (*PROMPT, *written, *QUESTION))
        assert result.computed_tokens == 1 + len(QUESTION)
    assert written == whole.token_ids


def test_an_activated_adapter_goes_on_from_the_keys_that_the_bases_branch_has_left(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints("qwen3")
    adapters = {
        "judge": save_adapter(tmp_path / "judge", base, alora_invocation_tokens=list(INVOCATION)),
        "plain": save_adapter(tmp_path / "plain", base),
    }
    harness = create_harness(base, adapters, PURE)
    branch = write(harness)
    tokens = (*branch, *INVOCATION)
    found = ask(harness, tokens, model="judge")
    alone = ask(create_harness(base, adapters, PURE), tokens, model="judge")
    assert (found.computed_tokens, alone.computed_tokens) == (1 + len(INVOCATION), len(tokens))
    assert found.values == alone.values
    # An adapter that is always active has keys of its own.
    assert ask(harness, tokens, model="plain").cached_tokens == 0


def test_a_branch_of_an_ordinary_adapter_is_given_up_by_its_tokens(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("qwen3")
    harness = create_harness(base, {"a": save_adapter(tmp_path / "a", base)}, PURE)
    [done] = harness.complete(generate(PROMPT, [BRANCH], model="a", pin_key="job", **LAW))
    assert len(harness.core.cache.retained) == 1
    harness.core.release("job", (*PROMPT, *done.token_ids))
    assert len(harness.core.cache.retained) == 0


def test_a_position_within_the_branch_is_computed_with_the_pages_of_its_time(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    harness = Harness(folder, PURE)
    branch = write(harness)
    item = ScoreItem((branch[:100], (*branch[100:], *QUESTION)), (0, 1), BOUND)
    [found] = harness.score(score(item, token_ids=(5, 6), pin_key="job"))
    [alone] = Harness(folder, PURE).score(score(item, token_ids=(5, 6)))
    assert found.values == alone.values
    assert found.cached_tokens < 100


def test_an_item_beyond_its_limit_is_not_computed_and_leaves_the_branch(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"), PURE)
    tokens = (*write(harness), *QUESTION)
    refused = ask(harness, tokens, max_compute=len(QUESTION))
    assert (refused.values, refused.computed_tokens) == (None, 1 + len(QUESTION))
    assert ask(harness, tokens, max_compute=1 + len(QUESTION)).values is not None


def test_questions_in_scarce_memory_have_the_bits_of_an_empty_engine(checkpoints: Checkpoints) -> None:
    """Branches lose their tables to each other, and questions then compute a branch again, with its drops."""
    folder = checkpoints("qwen3")
    options = EngineOptions(kv_tokens=416, max_running=4, lease_share=0.9, deterministic=True)
    harness = Harness(folder, options)
    harness.complete(generate(PROMPT, [replace(BRANCH, key=key) for key in range(4)], pin_key="job", **LAW))
    [first] = harness.complete(generate(PROMPT, [BRANCH], pin_key="job", **LAW))
    items = [
        ScoreItem(((*PROMPT, *first.token_ids[:cut], *QUESTION),), (0,), BOUND) for cut in (130, 120, 96, 91, 60, 4)
    ]
    found = harness.score(score(*items, token_ids=(5, 6), pin_key="job"))
    assert [result.index for result in found] == list(range(len(items)))
    for item, result in zip(items, found, strict=True):
        [alone] = Harness(folder, PURE).score(score(item, token_ids=(5, 6)))
        assert result.values == alone.values
    harness.core.release("job")
    assert harness.core.cache.num_available_pages == harness.core.cache.pool.size


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        (replace(BOUND, budget=40), "give 112 at least"),
        (replace(BOUND, budget=0), "between 1"),
        (replace(BOUND, start=-1), r"items\.key_bound\.start is -1"),
        (replace(BOUND, end=(99999,)), r"items\.key_bound\.end"),
        (replace(BOUND, seed=1 << 64), r"items\.key_bound\.seed"),
    ],
)
def test_a_wrong_bound_is_refused_before_a_token(checkpoints: Checkpoints, bound: KeyBound, message: str) -> None:
    harness = Harness(checkpoints("qwen3"))
    with pytest.raises(InvalidRequest, match=message):
        ask(harness, (*PROMPT, *QUESTION), bound)
    assert harness.core.stats.scored_tokens == 0


def test_models_that_cannot_drop_keys_refuse_a_bound_by_name(checkpoints: Checkpoints) -> None:
    with pytest.raises(InvalidRequest, match=r"leave items\.key_bound out"):
        ask(Harness(checkpoints("qwen3_window")), (*PROMPT, *QUESTION))
