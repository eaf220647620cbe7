"""Branches whose thoughts lose pages have the distribution of a model that does not see these, however they run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cache.page_drops import PageDrops
from engine.core.reference import float64
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Capability, Completion, InvalidRequest, KeyBound
from tests.engine.conftest import Checkpoints
from tests.engine.core.late_device import LateDevice
from tests.engine.exact import exact_logits, exact_reference, float32_loss
from tests.engine.gpu import emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate
from tests.long import mostly_long
from tests.seeds import shift

PROMPT = tuple(random.Random(shift(0)).choices(range(3, 360), k=37))
BUDGET = 128
"""Three pages of a prompt, and five of a thought."""
LAW = {"temperature": 0.9, "ignore_eos": True, "kv_budget": BUDGET}
BRANCHES = [Branch(seed=5, key=key, max_tokens=200) for key in range(6)]
PURE = replace(SMALL, deterministic=True)
KINDS = ["qwen3", "llama", "deepseek_v3", "granite"]


def visible(tokens: tuple[int, ...], bound: KeyBound) -> Tensor:
    """Return ``[tokens, tokens]``, True where a token sees another one, by a walk token by token."""
    drops, size = PageDrops(bound, 16), 16
    table: list[int] = []
    sees = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for position in range(len(tokens)):
        for place in drops.take_due(tokens, position):
            del table[place]
        if position % size == 0:
            table.append(position // size)
        for page in table:
            sees[position, page * size : (page + 1) * size] = True
    return sees.tril()


def exact_bounded_logprobs(folder: Path, tokens: tuple[int, ...], bound: KeyBound) -> Tensor:
    """Return ``[tokens, vocabulary]``: log-probabilities by transformers in float64, with the dropped keys masked."""
    sees = visible(tokens, bound)
    assert not bool(sees[-1].all())
    with float64():
        mask = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -torch.inf)
        logits: Tensor = exact_reference(folder)(torch.tensor([tokens]), attention_mask=mask[None, None]).logits[0]
    return logits.log_softmax(-1)


def same(left: list[Completion], right: list[Completion]) -> bool:
    return [(one.token_ids, one.logprob) for one in left] == [(one.token_ids, one.logprob) for one in right]


@pytest.mark.parametrize("case", mostly_long(range(20), every=4))
def test_the_distribution_is_that_of_a_model_with_the_dropped_keys_masked(checkpoints: Checkpoints, case: int) -> None:
    folder = checkpoints("qwen3")
    dice = random.Random(shift(case))
    prompt = tuple(dice.choices(range(3, 360), k=dice.randint(17, 48)))
    request = generate(prompt, [Branch(case, 1, 200)], **LAW | {"temperature": 1.0, "logprobs": 0})
    [found] = Harness(folder).complete(request)
    tokens = (*prompt, *found.token_ids)
    rows = range(len(prompt) - 1, len(tokens) - 1)
    expected = exact_bounded_logprobs(folder, tokens, KeyBound(BUDGET, len(prompt), seed=case))[rows, found.token_ids]
    complete = exact_logits(folder, tokens).log_softmax(-1)[rows, found.token_ids]
    assert found.logprobs is not None
    ours = torch.tensor([one.logprob for one in found.logprobs], dtype=torch.float64)
    loss = float32_loss(folder).logprob
    assert float((ours - expected).abs().max()) <= loss
    assert float((ours - complete).abs().max()) > 10 * loss


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=2))
def test_steps_neighbours_and_forks_change_no_bit(checkpoints: Checkpoints, kind: str) -> None:
    folder = checkpoints(kind)
    whole = Harness(folder, PURE).complete(generate(PROMPT, BRANCHES, **LAW))
    assert all(one.dropped_tokens > 50 for one in whole)
    assert len({one.token_ids for one in whole}) == len(BRANCHES)
    for options in (replace(PURE, step_tokens=24), EngineOptions(kv_tokens=288, max_running=4, deterministic=True)):
        harness = Harness(folder, options)
        assert same(harness.complete(generate(PROMPT, BRANCHES, **LAW)), whole)
    assert harness.core.stats.preemptions > 0
    harness = Harness(folder, PURE)
    for cut in (1, 60, 91, 92, 130, 199):
        parent, branch = whole[0].token_ids, BRANCHES[0]
        rest = replace(branch, generated=parent[:cut], max_tokens=200 - cut)
        [in_branch] = harness.complete(generate(PROMPT, [rest], **LAW))
        asked = generate((*PROMPT, *parent[:cut]), [replace(branch, max_tokens=200 - cut)], kv_start=len(PROMPT), **LAW)
        [in_prompt] = harness.complete(asked)
        assert in_branch.token_ids == in_prompt.token_ids == parent[cut:]
        first = harness.complete(generate(PROMPT, [replace(branch, max_tokens=cut)], **LAW))
        assert first[0].dropped_tokens + in_branch.dropped_tokens == whole[0].dropped_tokens


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=2))
def test_a_request_goes_on_where_a_branch_of_its_job_ended_and_computes_one_token(
    checkpoints: Checkpoints, kind: str
) -> None:
    folder = checkpoints(kind)
    harness, branch = Harness(folder, PURE), BRANCHES[0]
    [whole] = Harness(folder, PURE).complete(generate(PROMPT, [branch], **LAW))
    done: list[Completion] = []
    for length in (130, 1, 15, 16, 38):
        written = tuple(token for part in done for token in part.token_ids)
        part = replace(branch, generated=written, max_tokens=length)
        done += harness.complete(generate(PROMPT, [part], pin_key="job", **LAW))
    assert tuple(token for part in done for token in part.token_ids) == whole.token_ids
    assert sum(part.dropped_tokens for part in done) == whole.dropped_tokens
    assert all(part.cached_tokens == part.prompt_tokens - 1 for part in done[1:])
    assert harness.core.stats.kv_tokens <= BUDGET + 16
    # Forks share what the branch has left, and each copies the page that it goes on to write.
    parent = (*PROMPT, *whole.token_ids)
    asked = generate(parent, [Branch(5, key, 15) for key in range(4)], pin_key="job", kv_start=len(PROMPT), **LAW)
    forks = harness.complete(asked)
    assert all(fork.cached_tokens == len(parent) - 1 for fork in forks)
    for fork, one in zip(forks, asked.branches, strict=True):
        assert same([fork], Harness(folder, PURE).complete(replace(asked, branches=(one,), pin_key=None)))
    assert len({fork.token_ids for fork in forks}) == 4
    harness.core.release("job")
    assert harness.core.cache.num_available_pages == harness.core.cache.pool.size


@pytest.mark.parametrize("other", [{"cache_salt": "x"}, {"kv_budget": BUDGET + 16}, {"kv_end": (3,)}, {"seed": 6}])
def test_a_request_with_another_rule_or_namespace_computes_the_branch_itself(
    checkpoints: Checkpoints, other: dict[str, Any]
) -> None:
    folder, harness = checkpoints("qwen3"), Harness(checkpoints("qwen3"), PURE)
    [done] = harness.complete(generate(PROMPT, BRANCHES[:1], pin_key="job", **LAW))
    seed, settings = other.get("seed", 5), {name: value for name, value in other.items() if name != "seed"}
    rest = [Branch(seed, 0, 12, done.token_ids)]
    request = generate(PROMPT, rest, pin_key="job", **LAW | settings)
    [found], [alone] = harness.complete(request), Harness(folder, PURE).complete(request)
    assert found.cached_tokens < len(PROMPT) + 120
    assert (found.token_ids, found.logprob) == (alone.token_ids, alone.logprob)


def test_retained_branches_give_way_to_running_ones(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    harness = Harness(folder, EngineOptions(kv_tokens=512, max_running=4, lease_share=0.9, deterministic=True))
    harness.complete(generate(PROMPT, BRANCHES[:3], pin_key="first", **LAW))
    assert len(harness.core.cache.retained) == 3
    plain = generate(PROMPT[::-1], BRANCHES[3:5], temperature=0.9, ignore_eos=True)
    assert same(harness.complete(plain), Harness(folder, PURE).complete(plain))
    assert len(harness.core.cache.retained) < 3
    harness.core.clear_cache()
    assert harness.core.stats.kv_tokens == 0


def test_a_thought_that_ends_in_time_is_as_without_a_budget(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    plain = Harness(folder, PURE).complete(generate(PROMPT, BRANCHES, **LAW | {"kv_budget": None}))
    for one, branch in zip(plain, BRANCHES, strict=True):
        # The last token of the thought is the first of its kind.
        ends = next(token for place, token in enumerate(one.token_ids[:80]) if place > 20)
        [bounded] = Harness(folder, PURE).complete(generate(PROMPT, [branch], **LAW, kv_end=(ends,)))
        assert (bounded.token_ids, bounded.dropped_tokens) == (one.token_ids, 0)


def test_a_budget_bounds_the_memory_of_running_branches(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"), PURE)
    harness.submit(generate(PROMPT, BRANCHES, **LAW))
    most = 0
    while harness.core.has_work:
        harness.core.step()
        harness.core.check_invariants()
        most = max(most, harness.core.stats.kv_tokens)
    # Each has its own pages but two of the prompt's three, and one page that a step is about to fill.
    assert most <= 32 + len(BRANCHES) * (BUDGET - 32 + 16)


def test_a_branch_that_lost_pages_leaves_nothing_behind_that_others_take_for_complete(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    harness = Harness(folder, PURE)
    [bounded] = harness.complete(generate(PROMPT, BRANCHES[:1], **LAW))
    longer = generate((*PROMPT, *bounded.token_ids[:190]), [Branch(1, 1, 20)], temperature=0.9, ignore_eos=True)
    [found], [alone] = harness.complete(longer), Harness(folder, PURE).complete(longer)
    assert (found.token_ids, found.logprob) == (alone.token_ids, alone.logprob)


def test_a_gpu_that_computes_late_drops_the_same_pages(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")

    def run(prepare: Callable[[pytest.MonkeyPatch], Any]) -> list[tuple[tuple[int, ...], int]]:
        with pytest.MonkeyPatch.context() as patch:
            prepare(patch)
            done = Harness(folder, SMALL).complete(generate(PROMPT, BRANCHES, **LAW))
        return [(one.token_ids, one.dropped_tokens) for one in done]

    late = run(LateDevice(is_late=True).install)
    assert late == run(LateDevice(is_late=False).install)
    assert all(dropped > 50 for _, dropped in late)


def test_the_gpus_code_computes_the_same_tokens(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    request = generate(PROMPT, BRANCHES, **LAW | {"temperature": 0.0})
    with pytest.MonkeyPatch.context() as patch:
        emulate_gpu(patch)
        found = Harness(folder, SMALL).complete(request)
    plain = Harness(folder).complete(request)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]


def test_models_that_cannot_drop_keys_refuse_by_name(checkpoints: Checkpoints) -> None:
    for kind in ("qwen3_window", "qwen3_5", "deepseek_v32"):
        harness = Harness(checkpoints(kind))
        assert Capability.KV_BUDGET not in harness.core.model.info.capabilities
        with pytest.raises(InvalidRequest, match="leave kv_budget out"):
            harness.complete(generate(PROMPT, BRANCHES, **LAW))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kv_budget": 40}, "give 112 at least"),
        ({"kv_budget": 0}, "between 1"),
        ({"kv_budget": None, "kv_start": 3}, "need a kv_budget"),
        ({"kv_start": 99}, "kv_start is 99"),
        ({"prompt_logprobs": 0}, "leave one of them out"),
        ({"kv_end": (99999,)}, "kv_end"),
    ],
)
def test_a_wrong_budget_is_refused_before_a_token(
    checkpoints: Checkpoints, wrong: dict[str, Any], message: str
) -> None:
    harness = Harness(checkpoints("qwen3"))
    with pytest.raises(InvalidRequest, match=message):
        harness.complete(generate(PROMPT, BRANCHES, **LAW | wrong))
    assert harness.core.stats.generated_tokens == 0
