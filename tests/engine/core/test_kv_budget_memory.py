"""Branches whose thoughts lose pages beside others in scarce memory: what they hold, wait for and leave."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from engine.core.recovery import Recovery
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import SMALL, Harness, generate
from tests.seeds import shift

DICE = random.Random(shift(0))
PROMPT = tuple(DICE.choices(range(3, 360), k=37))
LONG = tuple(DICE.choices(range(3, 360), k=162))
OTHER = tuple(DICE.choices(range(3, 360), k=20))
PLAIN: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
LAW = PLAIN | {"kv_budget": 128}
PURE = replace(SMALL, deterministic=True)


@pytest.fixture(autouse=True)
def _let_no_step_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Recovery, error: Exception, *__: object) -> None:
        raise AssertionError("a step failed") from error

    monkeypatch.setattr(Recovery, "record_failure", fail)


@pytest.mark.parametrize("kind", ["another text", "the branch", "forks"])
def test_a_request_on_retained_pages_waits_until_it_fits_beside_them(checkpoints: Checkpoints, kind: str) -> None:
    options = EngineOptions(kv_tokens=416, max_running=4, lease_share=0.9, deterministic=True)
    harness = Harness(checkpoints("qwen3"), options)
    law = PLAIN | {"kv_budget": 240, "pin_key": "job"}
    [done] = harness.complete(generate(LONG, [Branch(1, 0, 84)], **law))
    events = harness.submit(generate(OTHER, [Branch(2, 0, 230)], **PLAIN))
    while harness.core.cache.pool.num_free:
        harness.core.step()
    request = {
        "another text": generate((*LONG, *OTHER, *PROMPT), [Branch(3, 0, 4)], **PLAIN),
        "the branch": generate(LONG, [Branch(1, 0, 8, done.token_ids)], **law),
        "forks": generate((*LONG, *done.token_ids), [Branch(1, 9, 8)], kv_start=len(LONG), **law),
    }[kind]
    events += harness.submit(request)
    harness.run()
    assert len(events) == 1
    assert len(harness.complete(request)) == 1


@pytest.mark.parametrize("first", [30, 75, 130])
def test_a_branch_in_parts_never_holds_more_than_its_budget(checkpoints: Checkpoints, first: int) -> None:
    harness = Harness(checkpoints("qwen3"), PURE)
    [part] = harness.complete(generate(PROMPT, [Branch(5, 0, first)], pin_key="job", **LAW))
    harness.submit(generate(PROMPT, [Branch(5, 0, 210 - first, part.token_ids)], pin_key="job", **LAW))
    most = 0
    while harness.core.has_work:
        harness.core.step()
        harness.core.check_invariants()
        most = max(most, harness.core.stats.kv_tokens)
    assert most <= 128


def test_forks_of_a_short_thought_share_it_and_drop_pages_each_for_itself(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"), PURE)
    [parent] = harness.complete(generate(PROMPT, [Branch(5, 0, 75)], pin_key="job", **LAW))
    forks = [Branch(5, key, 100) for key in range(3)]
    asked = generate((*PROMPT, *parent.token_ids), forks, pin_key="job", kv_start=len(PROMPT), **LAW)
    found = harness.complete(asked)
    for fork, one in zip(forks, found, strict=True):
        [alone] = Harness(checkpoints("qwen3"), PURE).complete(replace(asked, branches=(fork,)))
        assert (one.token_ids, one.logprob) == (alone.token_ids, alone.logprob)
    harness.core.release("job")
    assert harness.core.cache.num_available_pages == harness.core.cache.pool.size


def test_a_thought_that_ended_in_time_leaves_its_whole_answer_cached(checkpoints: Checkpoints) -> None:
    [plain] = Harness(checkpoints("qwen3"), PURE).complete(generate(PROMPT, [Branch(5, 0, 200)], **PLAIN))
    harness, written = Harness(checkpoints("qwen3"), PURE), tuple[int, ...]()
    for count in (50, 50, 50, 40):
        request = generate(PROMPT, [Branch(5, 0, count, written)], pin_key="job", kv_end=plain.token_ids[20:22], **LAW)
        [part] = harness.complete(request)
        assert part.cached_tokens == (part.prompt_tokens - 1 if written else 0)
        written += part.token_ids
    assert written == plain.token_ids[:190]


def test_a_bounded_branch_starts_where_its_budget_has_room(checkpoints: Checkpoints) -> None:
    [whole] = Harness(checkpoints("qwen3"), PURE).complete(generate(PROMPT, [Branch(5, 0, 200)], **LAW))
    harness = Harness(checkpoints("qwen3"), EngineOptions(kv_tokens=352, max_running=4, deterministic=True))
    cache = harness.core.cache
    harness.submit(generate(OTHER, [Branch(2, 0, 200)], **PLAIN))
    while cache.pool.size - cache.pool.num_free < 8:
        harness.core.step()
    harness.submit(generate(PROMPT, [Branch(5, 0, 10, whole.token_ids[:190])], **LAW))
    harness.core.step()
    assert harness.core.num_waiting == 0
    harness.run()


def test_of_a_plain_branch_and_one_with_dropped_pages_the_cheaper_one_is_preempted(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"), EngineOptions(kv_tokens=512, max_running=4, deterministic=True))
    harness.submit(generate(PROMPT[::-1], [Branch(2, 0, 210)], **PLAIN))
    bounded = harness.submit(generate(OTHER, [Branch(5, 0, 230)], **PLAIN | {"kv_budget": 96}))
    for _ in range(60):
        harness.core.step()
    harness.submit(generate(PROMPT[5:], [Branch(3, 0, 200)], **PLAIN))
    harness.run()
    assert harness.core.stats.preemptions > 0
    [done] = bounded
    # Nothing that it had dropped was computed and dropped a second time.
    assert harness.core.stats.dropped_tokens == done.dropped_tokens  # type: ignore[union-attr]


def test_branches_on_one_prompt_are_retained_up_to_the_cap_of_their_own_pages(checkpoints: Checkpoints) -> None:
    prompt = tuple(random.Random(shift(1)).choices(range(3, 360), k=128))
    options = EngineOptions(kv_tokens=2048, max_running=16, deterministic=True, lease_share=0.25)
    harness = Harness(checkpoints("qwen3"), options)
    law = PLAIN | {"kv_budget": 192}
    harness.complete(generate(prompt, [Branch(5, key, 100) for key in range(8)], pin_key="job", **law))
    assert len(harness.core.cache.retained) == 8
    options = replace(options, lease_share=0.05)
    harness = Harness(checkpoints("qwen3"), options)
    harness.complete(generate(prompt, [Branch(5, key, 100) for key in range(8)], pin_key="job", **law))
    assert len(harness.core.cache.retained) == 1


def test_a_pruned_branch_gives_up_its_tables_up_to_where_another_one_leaves_it(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"), PURE)
    [first] = harness.complete(generate(PROMPT, [Branch(5, 0, 130)], pin_key="job", **LAW))
    parent = (*PROMPT, *first.token_ids)
    law = LAW | {"pin_key": "job", "kv_start": len(PROMPT)}
    left, right = harness.complete(generate(parent, [Branch(5, key, 20) for key in (1, 2)], **law))
    assert len(harness.core.cache.retained) == 3
    harness.core.release("job", (*parent, *left.token_ids))
    assert len(harness.core.cache.retained) == 2
    harness.core.release("job", (*parent, *right.token_ids))
    assert len(harness.core.cache.retained) == 0


def test_tables_live_as_long_as_their_key_is_used(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"), replace(PURE, lease_seconds=100.0))
    now = [0.0]
    retained = harness.core.cache.retained
    retained._clock = lambda: now[0]
    harness.complete(generate(PROMPT, [Branch(5, 0, 130)], pin_key="job", **LAW))
    for now[0] in (60.0, 120.0, 180.0):
        harness.complete(generate(OTHER, [Branch(1, 0, 2)], pin_key="job", **PLAIN))
        assert len(retained) == 1
    now[0] = 281.0
    harness.complete(generate(OTHER, [Branch(1, 0, 2)], **PLAIN))
    assert len(retained) == 0


def test_a_damaged_page_ends_the_branches_that_read_or_hold_it_and_leaves_the_pins_right(
    checkpoints: Checkpoints,
) -> None:
    harness = Harness(checkpoints("qwen3"), PURE)
    text = (*PROMPT, *random.Random(shift(2)).choices(range(3, 360), k=120))
    harness.submit(generate(text, [Branch(6, 0, 60)], **PLAIN))
    harness.submit(generate(text, [Branch(5, 0, 60)], pin_key="job", kv_start=37, **LAW))
    for _ in range(10):
        harness.core.step()
    [table] = [one.pages for one in harness.core._scheduler.running if one.drops]
    assert table.held_pages  # which the other one reads
    for tensor in harness.core.cache.slot_tensors:
        tensor[:, :, :, table.held_pages[-1]] = float("nan")
    harness.run()
    harness.core.release("job")
    harness.core.check_invariants()
