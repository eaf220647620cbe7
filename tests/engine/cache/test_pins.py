"""Pins: pages that a request uses stay cached among other traffic, and never prevent a sequence from running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.cache import pins
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, GenerateRequest, InvalidRequest, ScoreItem, TokenizeRequest
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate, score
from tests.engine.simulation import PAGE, Simulation

PROMPT = tuple(range(10, 40))


class Small(Simulation):
    """A simulation with twelve pages; eight of them may be pinned, for ten seconds."""

    def __init__(self, *, pages: int = 12, max_pinned: int = 8) -> None:
        super().__init__(pages=pages, step_tokens=64, max_pinned=max_pinned, pin_seconds=10.0)
        self._strangers = 0

    def compute(self, tokens: list[int], pin_key: str | None = None, namespace: str | None = None) -> None:
        """Run a sequence to its end."""
        self.add([tokens], len(tokens), pin_key=pin_key, namespace=namespace)
        self.run()

    def strangers(self, pages: int) -> None:
        """Run traffic that pins nothing, enough to evict everything that is unused and not pinned."""
        for _ in range(3 * pages):
            self._strangers += 1
            self.compute([1000 + self._strangers] * PAGE)

    def cached(self, tokens: list[int], namespace: str | None = None) -> int:
        return self.cache.match_prefix(tokens, len(tokens), namespace).num_tokens

    @property
    def pinned(self) -> int:
        return self.cache.tree.num_pinned


def path(start: int, pages: int = 3) -> list[int]:
    return list(range(start, start + pages * PAGE))


def test_pinned_pages_outlast_pages_used_later() -> None:
    small = Small()
    small.compute(path(0), "job")
    small.compute(path(100))
    small.strangers(12)
    assert small.cached(path(0)) == 3 * PAGE
    assert small.cached(path(100)) == 0
    assert (small.pinned, len(small.cache.pins)) == (3, 1)


def test_a_partial_last_page_is_pinned_and_so_is_a_page_that_extends_it() -> None:
    small = Small()
    small.compute([1, 2, 3, 4, 5, 6])
    small.compute([1, 2, 3, 4, 5], "job")
    small.strangers(12)
    assert small.cached([1, 2, 3, 4, 5, 6]) == 6
    small.compute([1, 2, 3, 4, 5, 6, 7])
    small.strangers(12)
    assert small.cached([1, 2, 3, 4, 5, 6, 7]) >= 6


def test_pins_never_prevent_a_sequence_from_running() -> None:
    small = Small(max_pinned=12)
    for start in range(4):
        small.compute(path(100 * start), "job")
    assert (small.pinned, small.cache.num_available_pages) == (12, 12)
    small.compute(path(1000, pages=12))
    assert small.cached(path(1000, pages=12)) == 12 * PAGE
    assert len(small.cache.pins) == 0


def test_when_only_pinned_pages_are_left_the_least_recently_used_key_is_evicted_first() -> None:
    small = Small(max_pinned=12)
    for start, name in enumerate(("old", "middle", "new")):
        small.compute(path(100 * start, pages=4), name)
    small.cache.pins.touch("old")
    small.compute(path(1000, pages=4))
    assert [small.cached(path(100 * start, pages=4)) // PAGE for start in range(3)] == [4, 0, 4]


def test_a_key_over_the_cap_unpins_its_oldest_pages_last_page_of_a_branch_first() -> None:
    small = Small(pages=40, max_pinned=8)
    for start in range(2):
        small.compute(path(100 * start, pages=3), "job")
    small.compute([*path(0, pages=3), *path(500, pages=3)], "job")
    assert small.pinned == 8
    small.strangers(40)
    assert small.cached(path(100)) == 2 * PAGE
    assert small.cached([*path(0, pages=3), *path(500, pages=3)]) == 6 * PAGE


def test_one_key_cannot_pin_more_than_the_maximum() -> None:
    small = Small(pages=40, max_pinned=8)
    for start in range(10):
        small.compute(path(100 * start), "job")
        assert small.pinned <= 8
    assert small.cached(path(900)) == 3 * PAGE


def test_the_number_of_pin_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MAX_PIN_SETS", 3)
    small = Small()
    for number in range(6):
        small.compute(path(0), f"job-{number}")
    assert len(small.cache.pins) == 3
    assert small.pinned == 3


def test_an_unused_key_expires_and_a_used_one_does_not() -> None:
    small = Small()
    small.compute(path(0), "left")
    small.compute(path(100), "used")
    small.now = 6.0
    small.cache.pins.touch("used")
    small.cache.pins.touch("unheard of")
    small.now = 11.0
    small.cache.pins.expire()
    assert len(small.cache.pins) == 1
    small.strangers(12)
    assert (small.cached(path(0)), small.cached(path(100))) == (0, 3 * PAGE)


def test_pages_of_a_released_lease_are_evicted_like_any_other() -> None:
    small = Small()
    small.compute(path(0), "job")
    small.cache.pins.release("job")
    small.cache.pins.release("unheard of")
    assert (small.pinned, len(small.cache.pins)) == (0, 0)
    small.strangers(12)
    assert small.cached(path(0)) == 0


def test_a_page_pinned_by_two_jobs_stays_until_both_have_released_it() -> None:
    small = Small()
    for name in ("first", "second"):
        small.compute(path(0), name)
    small.cache.pins.release("first")
    small.strangers(12)
    assert small.cached(path(0)) == 3 * PAGE
    small.cache.pins.release("second")
    small.strangers(12)
    assert small.cached(path(0)) == 0


def test_a_pruned_branch_is_evicted_first_and_pages_shared_with_other_branches_stay_pinned() -> None:
    small = Small()
    trunk, left, right = path(0, pages=2), path(100, pages=2), path(200, pages=2)
    small.compute(path(900, pages=2))
    small.compute([*trunk, *left], "job")
    small.compute([*trunk, *right, 5], "job")
    # The last token of a branch was sampled, but not computed.
    small.cache.pins.prune("job", [*trunk, *left, 77])
    assert small.pinned == 5
    small.compute(path(800, pages=5))
    assert small.cached([*trunk, *left]) == 2 * PAGE
    assert small.cached([*trunk, *right, 5]) == 4 * PAGE + 1
    # The pruned branch was evicted before pages that had been used less recently.
    assert small.cached(path(900, pages=2)) == 2 * PAGE
    small.cache.pins.prune("job", [*trunk, *right, 5, 6])
    assert (small.pinned, len(small.cache.pins)) == (0, 0)


def test_pruning_a_shared_prefix_keeps_the_branches_that_continue_it() -> None:
    small = Small()
    small.compute(path(0, pages=2), "job")
    small.compute(path(0, pages=4), "job")
    small.cache.pins.prune("job", path(0, pages=2))
    assert small.pinned == 4


def test_pruning_does_not_mark_pages_of_other_jobs_for_eviction() -> None:
    small = Small()
    small.compute(path(0), "job")
    small.compute([*path(0), 1, 2], None)
    small.compute(path(0, pages=2), "other")
    small.compute(path(900))
    small.cache.pins.prune("job", path(0))
    small.cache.pins.prune("other", path(500))
    small.compute(path(800, pages=8))
    assert small.cached(path(0)) == 2 * PAGE
    assert small.pinned == 2


def test_a_branch_is_pruned_in_the_namespace_where_the_job_ran() -> None:
    small = Small()
    small.compute(path(0), "job", namespace="a")
    small.compute(path(0), "other", namespace="b")
    small.cache.pins.prune("job", path(0))
    assert (small.pinned, len(small.cache.pins)) == (3, 1)
    small.strangers(12)
    assert (small.cached(path(0), "a"), small.cached(path(0), "b")) == (0, 3 * PAGE)


def test_pages_of_a_preempted_sequence_are_pinned_under_its_key() -> None:
    small = Small(max_pinned=12)
    for start in range(4):
        small.add([path(100 * start)[: 1 + start]], 7 * PAGE, pin_key=f"job-{start}")
    while not small.scheduler.num_preemptions:
        small.step()
    assert small.pinned > 0
    small.run()


def test_the_invariant_check_finds_a_pin_without_a_key_and_a_key_without_its_pin() -> None:
    small = Small()
    small.compute(path(0), "job")
    [pin_key] = small.cache.pins._sets.values()
    node = max(pin_key.nodes, key=lambda node: node.key)
    length = pin_key.nodes.pop(node)
    with pytest.raises(RuntimeError, match="do not agree"):
        small.cache.check()
    pin_key.nodes[node] = length
    small.cache.check()
    first = min(pin_key.nodes, key=lambda node: node.key)
    small.cache.tree.unpin(first, pin_key)
    with pytest.raises(RuntimeError, match="not pinned although"):
        small.cache.check()


# The tests below use a real engine.


def options(**more: object) -> EngineOptions:
    return EngineOptions(kv_tokens=320, max_running=4, step_tokens=64, debug=True, **more)  # type: ignore[arg-type]


def test_a_pin_changes_the_cache_but_no_token(checkpoints: Checkpoints) -> None:
    cached, tokens = {}, {}
    for pin_key in (None, "job"):
        harness = Harness(checkpoints("qwen3"), options())
        harness.complete(generate(PROMPT, [Branch(1, 1, 20)], pin_key=pin_key, ignore_eos=True))
        for start in range(40, 300, 50):
            harness.complete(generate(range(start, start + 50), [Branch(1, 1, 20)], ignore_eos=True))
        again = generate(PROMPT, [Branch(1, 1, 20)], pin_key=pin_key, ignore_eos=True)
        [completion] = harness.complete(again)
        cached[pin_key], tokens[pin_key] = completion.cached_tokens, completion.token_ids
    assert cached == {None: 0, "job": len(PROMPT) - 1}
    assert tokens[None] == tokens["job"]


def test_score_requests_can_pin(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3_classify"), options())
    harness.score(score(ScoreItem((PROMPT,), (0,)), pin_key="job"))
    assert (harness.core.stats.pins, harness.core.stats.pinned_tokens) == (1, 32)
    harness.core.release("job")
    assert (harness.core.stats.pins, harness.core.stats.pinned_tokens) == (0, 0)


def test_a_sequence_that_ends_after_its_lease_was_released_pins_nothing(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"), options())
    harness.submit(generate(PROMPT, [Branch(1, key, 20) for key in range(3)], pin_key="job", ignore_eos=True))
    harness.core.step()
    harness.core.release("job")
    harness.run()
    assert harness.core.stats.pins == 0


def test_pages_of_a_cancelled_request_stay_pinned_under_its_key(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"), options())
    harness.submit(generate(PROMPT, [Branch(1, 1, 20)], pin_key="job", ignore_eos=True))
    harness.core.step()
    harness.core.cancel(lambda _: True)
    assert harness.core.stats.pinned_tokens == 32
    harness.core.clear_cache()
    assert (harness.core.stats.pinned_tokens, harness.core.stats.kv_tokens) == (0, 0)
    harness.core.check_invariants()


def test_pins_expire_while_the_engine_is_running(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"), options(lease_seconds=0.0))
    harness.complete(generate(PROMPT, [Branch(1, 1, 2)], pin_key="job", ignore_eos=True))
    assert harness.core.stats.pins == 1
    harness.complete(generate((5, 6), [Branch(1, 1, 2)], ignore_eos=True))
    assert harness.core.stats.pins == 0


def test_requests_with_different_salts_share_no_prefix(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"), options())
    seen = []
    for salt in (None, "a", "a", "b", None):
        [completion] = harness.complete(generate(PROMPT, [Branch(1, 1, 9)], cache_salt=salt, ignore_eos=True))
        seen.append((completion.cached_tokens, completion.token_ids))
    assert [cached for cached, _ in seen] == [0, 0, len(PROMPT) - 1, 0, len(PROMPT) - 1]
    assert len({tokens for _, tokens in seen}) == 1


@pytest.mark.parametrize(
    ("field", "value"), [("lease", ""), ("lease", "x" * 257), ("cache_salt", ""), ("priority", 1 << 31)]
)
def test_an_invalid_pin_key_or_priority_is_refused(checkpoints: Checkpoints, field: str, value: object) -> None:
    harness = Harness(checkpoints("qwen3"), options())
    with pytest.raises(InvalidRequest) as refusal:
        harness.submit(generate(PROMPT, [Branch(1, 1, 1)], **{{"lease": "pin_key"}.get(field, field): value}))  # type: ignore[arg-type]
    assert refusal.value.field == field


@pytest.fixture
async def engine(checkpoints: Checkpoints) -> AsyncIterator[LocalEngine]:
    local = LocalEngine({"m": checkpoints("qwen3"), "prm": checkpoints("qwen3_classify")}, options())
    yield local
    await local.close()


async def collect(engine: LocalEngine, wanted: GenerateRequest) -> list[Completion]:
    return [event async for event in engine.generate(wanted) if isinstance(event, Completion)]


async def test_a_release_is_sent_to_every_model(engine: LocalEngine) -> None:
    await asyncio.gather(
        collect(engine, generate(PROMPT, [Branch(1, 1, 5)], pin_key="job", ignore_eos=True)),
        engine.score(score(ScoreItem((PROMPT,), (0,)), model="prm", pin_key="job")),
    )
    assert [stats.pins for stats in engine.stats().values()] == [1, 1]
    await engine.release("job")
    await engine.tokenize(TokenizeRequest("m", "x"))
    await collect(engine, generate((5, 6), [Branch(1, 1, 1)]))
    assert [stats.pins for stats in engine.stats().values()] == [0, 0]


async def test_releasing_a_pruned_branch_keeps_the_other_pins_of_the_key(engine: LocalEngine) -> None:
    first, second = await collect(
        engine, generate(PROMPT, [Branch(1, key, 40) for key in range(2)], pin_key="job", ignore_eos=True)
    )
    before = engine.stats()["m"].pinned_tokens
    await engine.release("job", (*PROMPT, *first.token_ids))
    await collect(engine, generate((5, 6), [Branch(1, 1, 1)]))
    assert 32 <= engine.stats()["m"].pinned_tokens < before
    [warm] = await collect(engine, generate((*PROMPT, *second.token_ids), [Branch(1, 1, 1)], pin_key="job"))
    assert warm.cached_tokens == len(PROMPT) + 39
