"""Thousands of random operations on a pool that is always too small.

Every invariant holds after each of them, and every branch has the same tokens as without a cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.simulation import PAGE, VOCABULARY, Bound, Branch, Simulation

PAGES = 14
TOKENS = st.integers(0, VOCABULARY - 1)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=30)
NAMESPACES = st.sampled_from([None, None, None, "a", "b"])
PIN_KEYS = st.sampled_from([None, "first", "second", "third"])
ROOMS = st.sampled_from([None, None, 4, 5])
"""Pages that a bounded branch keeps of what it generates."""
PRIORITIES = st.sampled_from([0, 0, 0, -1, 1])

seen: dict[str, int] = {}
"""Counts of the events of the whole run, which must all occur, so that the operations stay demanding."""


class Traffic(RuleBasedStateMachine):
    """Operations of an engine's clients, in any order."""

    dtype = torch.float32

    @initialize(rows=st.integers(1, 6), step_tokens=st.integers(1, 40), max_pinned=st.integers(0, PAGES))
    def start(self, rows: int, step_tokens: int, max_pinned: int) -> None:
        self.engine = Simulation(
            pages=PAGES,
            rows=rows,
            step_tokens=step_tokens,
            max_pinned=max_pinned,
            pin_seconds=8.0,
            dtype=self.dtype,
        )
        # Four branches that do not fit together: any history with several rows has preemptions.
        self._submit([[token] * 20 for token in range(4)], 2 * PAGE, None, None, 0, float("inf"))

    @rule(
        prompt=PROMPTS, count=st.integers(1, 5), more=st.integers(1, 24), namespace=NAMESPACES, pin_key=PIN_KEYS,
        priority=PRIORITIES, deadline=st.sampled_from([float("inf"), 5.0, 50.0]), room=ROOMS,
    )  # fmt: skip
    def submit(
        self,
        prompt: list[int],
        count: int,
        more: int,
        namespace: str | None,
        pin_key: str | None,
        priority: int,
        deadline: float,
        room: int | None,
    ) -> None:
        bound = None if room is None else Bound((-(-len(prompt) // PAGE) + room) * PAGE, len(prompt))
        self._submit([prompt] * count, more, namespace, pin_key, priority, deadline, bound)

    @precondition(lambda self: self.engine.ended)
    @rule(data=st.data(), more=st.integers(1, 12), pin_key=PIN_KEYS, priority=PRIORITIES)
    def fork(self, data: st.DataObject, more: int, pin_key: str | None, priority: int) -> None:
        """Fork branches from a finished one, each at another token."""
        parent = data.draw(st.sampled_from(self.engine.ended[-8:]))
        cuts = data.draw(st.lists(st.integers(1, len(parent.tokens)), min_size=1, max_size=4))
        ends = data.draw(st.lists(TOKENS, max_size=2))
        prompts = [(parent.tokens[:cut] + ends)[: PAGES * PAGE - 1] for cut in cuts]
        bound = parent.bound if parent.bound is not None and min(map(len, prompts)) >= parent.bound.start else None
        self._submit(prompts, more, parent.namespace, pin_key, priority, float("inf"), bound)

    @precondition(lambda self: any(branch.bound for branch in self.engine.ended[-8:]))
    @rule(data=st.data(), count=st.integers(1, 3), more=st.integers(1, 16), pin_key=PIN_KEYS)
    def go_on(self, data: st.DataObject, count: int, more: int, pin_key: str | None) -> None:
        """Go on with a branch that may have lost pages."""
        parent = data.draw(st.sampled_from([branch for branch in self.engine.ended[-8:] if branch.bound]))
        prompt = parent.tokens[: PAGES * PAGE - 1]
        if parent.bound is not None and len(prompt) >= parent.bound.start:
            bound, seed = parent.bound, parent.seed
            self._submit([prompt] * count, more, parent.namespace, pin_key, 0, float("inf"), bound, seed)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.now += 0.5
            self.engine.cache.pins.expire()
            self.engine.cache.retained.expire()
            if self.engine.busy:
                self.engine.step()

    @rule()
    def finish_everything(self) -> None:
        self.engine.run()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(self.engine.requests)))

    @rule(pin_key=PIN_KEYS)
    def release(self, pin_key: str | None) -> None:
        self.engine.cache.pins.release(str(pin_key))
        self.engine.cache.retained.release(str(pin_key))

    @precondition(lambda self: self.engine.ended)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        branch: Branch = data.draw(st.sampled_from(self.engine.ended[-8:]))
        self.engine.cache.pins.prune(str(branch.pin_key), branch.tokens)
        self.engine.cache.retained.prune(str(branch.pin_key), branch.tokens)

    @rule()
    def evict(self) -> None:
        self.engine.cache.tree.evict()

    @rule()
    def clear(self) -> None:
        self.engine.cache.clear()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run()
            self.engine.cache.clear()
            assert self.engine.cache.pool.num_free == PAGES
            scheduler = self.engine.scheduler
            for name in ("num_preemptions", "num_dropped_tokens", "prompt_tokens", "cached_tokens"):
                seen[name] = seen.get(name, 0) + getattr(scheduler, name)

    def _submit(
        self,
        prompts: list[list[int]],
        more: int,
        namespace: str | None,
        pin_key: str | None,
        priority: int,
        deadline: float,
        bound: Bound | None = None,
        seed: int | None = None,
    ) -> None:
        length = min(max(map(len, prompts)) + more, PAGES * PAGE)
        self.engine.add(
            prompts,
            length,
            namespace=namespace,
            pin_key=pin_key,
            priority=priority,
            deadline=deadline,
            bound=bound,
            seed=seed,
        )
        if pin_key is not None:
            self.engine.cache.pins.touch(pin_key)


class NarrowTraffic(Traffic):
    """The same operations with an 8-bit cache."""

    dtype = torch.int8


@pytest.mark.parametrize("traffic", [Traffic, NarrowTraffic])
def test_random_operations_keep_every_invariant_and_change_no_token(traffic: type[Traffic]) -> None:
    seen.clear()
    machine = traffic.TestCase
    machine.settings = settings(
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    machine("runTest").runTest()
    assert seen["num_preemptions"] > 0
    assert seen["num_dropped_tokens"] > 0
    assert seen["cached_tokens"] * 10 > seen["prompt_tokens"]
