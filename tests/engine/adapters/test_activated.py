"""Activated adapters: the base's keys up to the invocation, shared with the base, and the adapter's from there on."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.protocol.types import Branch, InvalidRequest, ScoreItem
from tests.engine.adapters.lora import INVOCATION, assert_adapted, create_harness, exact_logprobs, save_adapter
from tests.engine.adapters.test_adapters import EXACT, TEXT, read_logits
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate, score
from tests.seeds import shift

SIZE = SMALL.page_size


@pytest.fixture
def adapter(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "judge", checkpoints("qwen3"), alora_invocation_tokens=list(INVOCATION))


def think(harness: Harness, prompt: tuple[int, ...] = TEXT, size: int = 30) -> tuple[int, ...]:
    """Let the base write a branch; return its tokens, whose keys are then cached, all but the last one's."""
    [done] = harness.complete(generate(prompt, [Branch(shift(1), 0, size)], ignore_eos=True))
    return (*prompt, *done.token_ids)


@pytest.mark.parametrize("length", [3, SIZE - 2, SIZE, SIZE + 5, 60])
def test_logits_are_those_of_the_definition_in_float64(length: int, adapter: Path, checkpoints: Checkpoints) -> None:
    base, tokens = checkpoints("qwen3"), (*TEXT[:length], *INVOCATION, *TEXT[5:17])
    harness = create_harness(base, {"judge": adapter})
    assert_adapted(read_logits(harness, "judge", tokens), base, adapter, tokens, start=length)


def test_the_last_occurrence_activates(adapter: Path, checkpoints: Checkpoints) -> None:
    base, tokens = checkpoints("qwen3"), (*INVOCATION, *TEXT[:9], *INVOCATION, *TEXT[:4], *INVOCATION[:2])
    harness = create_harness(base, {"judge": adapter})
    assert_adapted(read_logits(harness, "judge", tokens), base, adapter, tokens, start=12)


@pytest.mark.parametrize("size", range(20, 20 + SIZE + 1, 4))
def test_a_verdict_on_a_cached_branch_computes_the_invocation_alone_and_is_exact(
    size: int, adapter: Path, checkpoints: Checkpoints
) -> None:
    """The last token of the branch has no keys yet, as it was only sampled."""
    base = checkpoints("qwen3")
    harness = create_harness(base, {"judge": adapter}, replace(SMALL, debug=True))
    branch = think(harness, size=size)
    tokens = (*branch, *INVOCATION)
    [result] = harness.score(score(ScoreItem((tokens,), (0,)), model="judge", token_ids=range(400)))
    assert (result.computed_tokens, result.cached_tokens) == (1 + len(INVOCATION), len(branch) - 1)
    assert result.values is not None

    ours = torch.tensor(result.values)
    assert_adapted(ours, base, adapter, tokens, start=len(branch), first=len(tokens) - 1)


def test_the_base_goes_on_from_pages_that_an_activated_adapter_has_computed_before_its_invocation(
    adapter: Path, checkpoints: Checkpoints
) -> None:
    base = checkpoints("qwen3")
    harness, plain = create_harness(base, {"judge": adapter}, EXACT), Harness(base, EXACT)
    harness.score(score(ScoreItem(((*TEXT, *INVOCATION),), (0,)), model="judge", token_ids=(5,)))
    wanted = generate((*TEXT, *INVOCATION), [Branch(shift(1), 0, 30)], ignore_eos=True, logprobs=0)
    [found], [expected] = harness.complete(wanted), plain.complete(wanted)
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert (found.cached_tokens, expected.cached_tokens) == (len(TEXT), 0)


def test_verdicts_between_the_steps_of_a_branch_change_no_bit_of_it(adapter: Path, checkpoints: Checkpoints) -> None:
    base = checkpoints("qwen3")
    harness, plain = create_harness(base, {"judge": adapter}, EXACT), Harness(base, EXACT)
    mixed = pure = TEXT
    for step in range(6):
        size = 5 + 3 * step
        mixed, pure = think(harness, mixed, size), think(plain, pure, size)
        item = ScoreItem(((*mixed, *INVOCATION),), (0,))
        [result] = harness.score(score(item, model="judge", token_ids=(5, 6), pin_key="job"))
        assert result.computed_tokens == 1 + len(INVOCATION)
        cold = create_harness(base, {"judge": adapter}, EXACT)
        [alone] = cold.score(score(item, model="judge", token_ids=(5, 6)))
        assert result.values == alone.values
    assert mixed == pure


def test_what_an_activated_adapter_writes_is_its_own(adapter: Path, checkpoints: Checkpoints) -> None:
    """Tokens that it generates are active, also where they repeat the invocation, and cached as such."""
    base = checkpoints("qwen3")
    harness = create_harness(base, {"judge": adapter}, EXACT)
    branch = think(harness)
    wanted = generate((*branch, *INVOCATION), [Branch(3, 0, 40)], model="judge", ignore_eos=True, logprobs=0)
    [first] = harness.complete(wanted)
    [again] = harness.complete(wanted)
    assert (first.cached_tokens, again.cached_tokens) == (len(branch) - 1, len(branch) + len(INVOCATION) - 1)
    assert again.token_ids == first.token_ids
    text = (*branch, *INVOCATION, *first.token_ids)
    exact, bound = exact_logprobs(base, adapter, text, start=len(branch))
    for position, detail in enumerate(first.logprobs or (), len(branch) + len(INVOCATION) - 1):
        assert abs(detail.logprob - float(exact[position, detail.token_id])) < bound


def test_an_interrupted_branch_goes_on_from_where_it_was_activated(adapter: Path, checkpoints: Checkpoints) -> None:
    base, prompt = checkpoints("qwen3"), (*TEXT, *INVOCATION)
    harness = create_harness(base, {"judge": adapter}, EXACT)
    [whole] = harness.complete(generate(prompt, [Branch(3, 0, 40)], model="judge", ignore_eos=True))
    part = whole.token_ids[:17]
    rest = generate(prompt, [Branch(3, 0, 23, generated=part)], model="judge", ignore_eos=True)
    [end] = create_harness(base, {"judge": adapter}, EXACT).complete(rest)
    assert (*part, *end.token_ids) == whole.token_ids


def test_a_verdict_does_not_keep_a_pruned_branch_pinned(adapter: Path, checkpoints: Checkpoints) -> None:
    harness = create_harness(checkpoints("qwen3"), {"judge": adapter}, SMALL)
    [done] = harness.complete(generate(TEXT, [Branch(1, 0, 30)], ignore_eos=True, pin_key="job"))
    branch = (*TEXT, *done.token_ids)
    harness.score(score(ScoreItem(((*branch, *INVOCATION),), (0,)), model="judge", token_ids=(5,), pin_key="job"))
    assert harness.core.cache.tree.num_pinned > 0
    harness.core.release("job", branch)
    assert harness.core.cache.tree.num_pinned == 0


def test_a_branch_of_an_ordinary_adapter_is_unpinned_by_its_tokens(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("qwen3")
    harness = create_harness(base, {"a": save_adapter(tmp_path / "a", base)}, SMALL)
    [done] = harness.complete(generate(TEXT, [Branch(1, 0, 30)], model="a", ignore_eos=True, pin_key="job"))
    assert harness.core.cache.tree.num_pinned > 0
    harness.core.release("job", (*TEXT, *done.token_ids))
    assert harness.core.cache.tree.num_pinned == 0


def test_a_prompt_without_the_invocation_is_refused(adapter: Path, checkpoints: Checkpoints) -> None:
    harness = create_harness(checkpoints("qwen3"), {"judge": adapter})
    for request in (
        generate((*TEXT, *INVOCATION[:2]), [Branch(1, 0, 5)], model="judge"),
        score(ScoreItem((TEXT,), (0,)), model="judge", token_ids=(5,)),
    ):
        with pytest.raises(InvalidRequest, match=r"begins at the tokens \[7, 9, 8\], which the prompt does not have"):
            harness.submit(request)


def test_random_requests_to_a_base_and_two_activated_adapters_never_mix_keys(
    adapter: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Every answer has the bits of an engine that has nothing cached, whatever came before, in a small cache."""
    base = checkpoints("qwen3")
    other = save_adapter(tmp_path / "other", base, seed=8, alora_invocation_tokens=[7])
    always = save_adapter(tmp_path / "always", base, seed=9)
    adapters = {"judge": adapter, "other": other, "always": always}
    busy = create_harness(base, adapters, replace(EXACT, kv_tokens=512))
    rng = random.Random(shift(11))
    branches = [TEXT[:20]]
    for _ in range(25):
        tokens = (*rng.choice(branches), *rng.choices(range(10, 360), k=rng.randrange(0, 24)))
        branches.append(tokens)
        model = rng.choice(["m", *adapters])
        tokens = (*tokens, *(INVOCATION if model != "other" else (7,)))
        wanted = generate(tokens, [Branch(1, 0, rng.randrange(1, 20))], model=model, ignore_eos=True, logprobs=0)
        [found] = busy.complete(wanted)
        [expected] = create_harness(base, adapters, EXACT).complete(wanted)
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
        if rng.random() < 0.5:
            branches.append((*tokens, *found.token_ids))


def test_a_model_with_states_goes_on_from_the_bases_state_too(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("qwen3_5")
    folder = save_adapter(tmp_path / "a", base, modules=("in_proj_qkv", "q_proj"), alora_invocation_tokens=[7, 9, 8])
    harness = create_harness(base, {"judge": folder}, SMALL)
    branch = think(harness)
    tokens = (*branch, *INVOCATION)
    [result] = harness.score(score(ScoreItem((tokens,), (0,)), model="judge", token_ids=range(400)))
    assert result.cached_tokens > len(TEXT)
    assert result.values is not None

    assert_adapted(torch.tensor(result.values), base, folder, tokens, start=len(branch), first=len(tokens) - 1)


def test_the_path_of_a_gpu_activates_too(
    adapter: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tokens = checkpoints("qwen3"), (*TEXT[:37], *INVOCATION, *TEXT[5:17])
    emulate_gpu(monkeypatch)
    harness = create_harness(base, {"judge": adapter})
    think(harness, TEXT[:37])
    for _ in range(3):
        assert_adapted(read_logits(harness, "judge", tokens), base, adapter, tokens, start=37)
