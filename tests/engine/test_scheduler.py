"""The scheduler alone, with a model that computes nothing: budgets, order, waiting for a prefix, and no deadlock."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.kv import KVCache
from engine.scheduler import Scheduler
from engine.sequence import Job, Sequence

PAGE = 4


class Simulation:
    """Runs sequences to their full length; every computed sequence gets a token that nobody else has."""

    def __init__(self, *, pages: int = 100, rows: int = 8, step_tokens: int = 32) -> None:
        self.cache = KVCache(
            layers=1, kv_heads=1, head_dim=1, pages=pages, page_size=PAGE, rows=rows, context=pages * PAGE
        )
        self.scheduler = Scheduler(self.cache, max_running=rows, step_tokens=step_tokens)
        self.rows, self.step_tokens = rows, step_tokens
        self.lengths: dict[Sequence, int] = {}
        self.finished: list[int] = []
        self.computed = 0

    def add(self, prompt: list[int], length: int) -> Sequence:
        job = Job(str(len(self.lengths)), lambda _: None)
        sequence = Sequence(job=job, index=len(self.lengths), tokens=prompt, prefix=len(prompt))
        job.sequences.append(sequence)
        self.lengths[sequence] = length
        self.scheduler.add(job)
        return sequence

    def step(self) -> list[tuple[int, int]]:
        """One step; returns (sequence, tokens) pairs."""
        schedule = self.scheduler.schedule()
        total = sum(count for _, count in schedule.work)
        assert 0 < total <= self.step_tokens
        assert len(self.scheduler.running) <= self.rows
        self.computed += total
        for sequence, count in schedule.work:
            sequence.computed += count
            self.cache.publish(sequence.pages, sequence.tokens, sequence.computed, tail=True)
            if sequence.computed == len(sequence.tokens):
                if len(sequence.tokens) >= self.lengths[sequence]:
                    self.scheduler.finish(sequence)
                    self.finished.append(sequence.index)
                else:
                    sequence.tokens.append(1000 + sequence.index)
        self.scheduler.check()
        return [(sequence.index, count) for sequence, count in schedule.work]

    def run(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    simulation = Simulation(step_tokens=10)
    simulation.add(list(range(25)), 25)
    assert [simulation.step() for _ in range(3)] == [[(0, 10)], [(0, 10)], [(0, 5)]]


def test_sequences_that_run_and_new_ones_share_one_step() -> None:
    simulation = Simulation(step_tokens=10)
    simulation.add([1, 2], 9)
    simulation.step()
    simulation.add(list(range(10, 30)), 20)
    assert simulation.step() == [(0, 1), (1, 9)]


def test_equal_prompts_are_computed_once() -> None:
    simulation = Simulation()
    for _ in range(4):
        simulation.add(list(range(17)), 18)
    simulation.run()
    assert simulation.computed == 17 + 3 + 4


def test_who_shares_nothing_is_not_held_up_by_those_who_wait() -> None:
    simulation = Simulation(step_tokens=20)
    simulation.add(list(range(16)), 20)
    simulation.add(list(range(16)), 20)
    simulation.add([50, 51, 52], 20)
    assert simulation.step() == [(0, 16), (2, 3)]
    assert (1, 1) in simulation.step()


def test_a_short_common_beginning_is_not_worth_waiting_for() -> None:
    simulation = Simulation()
    simulation.add([1, 2, 3, 10, 11, 12], 7)
    simulation.add([1, 2, 3, 20, 21, 22], 7)
    assert simulation.step() == [(0, 6), (1, 6)]


def test_the_youngest_gives_way_and_the_oldest_finishes_first() -> None:
    simulation = Simulation(pages=8)
    for index in range(3):
        simulation.add([index] * 4, 24)
    simulation.run()
    assert simulation.scheduler.preemptions > 0
    assert simulation.finished == [0, 1, 2]


def test_dropping_a_job_takes_out_those_that_run_and_those_that_wait() -> None:
    simulation = Simulation(rows=1)
    running, waiting = simulation.add([1, 2, 3], 9), simulation.add([4, 5, 6], 9)
    simulation.step()
    simulation.scheduler.drop(waiting.job)
    simulation.scheduler.drop(running.job)
    assert not simulation.scheduler.running
    assert not simulation.scheduler.waiting
    assert simulation.cache.available == simulation.cache.pool.size


PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(0, 2), st.integers(0, 20))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(PROMPTS, min_size=1, max_size=12), st.integers(10, 16), st.integers(1, 5), st.integers(5, 40), st.data()
)
def test_every_sequence_finishes_on_a_pool_that_can_hold_the_longest(
    shapes: list[tuple[int, int, int, int]], pages: int, rows: int, step_tokens: int, data: st.DataObject
) -> None:
    simulation = Simulation(pages=pages, rows=rows, step_tokens=step_tokens)
    for first, length, second, more in shapes:
        prompt = ([first] * length + [second] * more)[: pages * PAGE]
        simulation.add(prompt, min(len(prompt) + data.draw(st.integers(0, 20)), pages * PAGE))
        if data.draw(st.booleans()):
            simulation.step()
    simulation.run()
    assert sorted(simulation.finished) == list(range(len(shapes)))
    assert simulation.cache.available == pages
