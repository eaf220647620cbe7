"""The scheduler alone, with a model that computes nothing: budgets, order, waiting for a prefix, and no deadlock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.scheduler import MAX_BYPASSES, QUEUE_WINDOW
from engine.scheduler.sequence import Job, Sequence
from tests.engine.simulation import PAGE, Simulation


def cold(index: int, length: int = 8) -> list[int]:
    """A prompt that shares nothing with others of another index."""
    return [100 + index] * length


def indices(job: Job) -> list[int]:
    return [sequence.index for sequence in job.sequences]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    simulation = Simulation(step_tokens=10)
    simulation.add([list(range(25))], 25)
    assert [simulation.step() for _ in range(3)] == [[(0, 10)], [(0, 10)], [(0, 5)]]


def test_sequences_that_run_and_new_ones_share_one_step() -> None:
    simulation = Simulation(step_tokens=10)
    simulation.add([[1, 2]], 9)
    simulation.step()
    simulation.add([list(range(10, 30))], 20)
    assert simulation.step() == [(0, 1), (1, 9)]


def test_a_long_prompt_that_goes_first_does_not_stall_those_that_generate() -> None:
    simulation = Simulation(step_tokens=10)
    simulation.add([[1], [2]], 40)
    simulation.step()
    simulation.add([list(range(100))], 120, priority=1)
    for _ in range(10):
        assert dict(simulation.step()) == {0: 1, 1: 1, 2: 8}


def test_those_that_generate_leave_a_quarter_of_the_step_to_prompts() -> None:
    simulation = Simulation(step_tokens=8, rows=16)
    simulation.add([[index] for index in range(10)], 40)
    for _ in range(2):
        simulation.step()
    simulation.add([cold(0, 6)], 20)
    assert dict(simulation.step())[10] == 2
    assert dict(simulation.step())[10] == 2


def test_a_step_of_one_token_goes_to_those_that_generate_while_others_find_no_memory() -> None:
    simulation = Simulation(pages=4, step_tokens=1)
    simulation.add([[1] * 8, [2] * 8], 14)
    for _ in range(8):
        simulation.step()
    assert simulation.step() == [(0, 1)]
    simulation.run()
    assert simulation.finished == [0, 1]


def test_equal_prompts_are_computed_once() -> None:
    simulation = Simulation()
    for _ in range(4):
        simulation.add([list(range(17))], 18)
    simulation.run()
    assert simulation.computed == 17 + 3


def test_siblings_in_the_hundreds_wait_for_the_first_while_others_start() -> None:
    simulation = Simulation(step_tokens=64, rows=64, pages=200)
    simulation.add([list(range(61))] * 300, 62)
    simulation.add([cold(1, 3)], 5)
    assert simulation.step() == [(0, 61), (300, 3)]
    assert [count for index, count in simulation.step() if index < 300] == [1] * 63


def test_who_shares_nothing_is_not_held_up_by_those_who_wait() -> None:
    simulation = Simulation(step_tokens=20)
    simulation.add([list(range(16))], 20)
    simulation.add([list(range(16))], 20)
    simulation.add([[50, 51, 52]], 20)
    assert simulation.step() == [(0, 16), (2, 3)]
    assert (1, 1) in simulation.step()


def test_a_short_common_beginning_is_not_worth_waiting_for() -> None:
    simulation = Simulation()
    simulation.add([[1, 2, 3, 10, 11, 12]], 7)
    simulation.add([[1, 2, 3, 20, 21, 22]], 7)
    assert simulation.step() == [(0, 6), (1, 6)]


def test_nobody_waits_for_a_prefix_of_another_namespace() -> None:
    simulation = Simulation(step_tokens=64)
    simulation.add([list(range(16))], 20, namespace="a")
    simulation.add([list(range(16))], 20, namespace="b")
    assert simulation.step() == [(0, 16), (1, 16)]


# Who starts first.


def order_of_start(simulation: Simulation) -> list[int]:
    """The sequences in the order in which they start, which is also that of their end when one runs at a time."""
    simulation.run()
    return simulation.finished


def test_a_higher_priority_starts_first() -> None:
    simulation = Simulation(rows=1)
    for index, priority in enumerate((0, -1, 5, 0, 5)):
        simulation.add([cold(index)], 9, priority=priority)
    assert order_of_start(simulation) == [2, 4, 0, 3, 1]


def test_an_earlier_deadline_starts_first_among_equals() -> None:
    simulation = Simulation(rows=1)
    for index, deadline in enumerate((float("inf"), 30.0, 10.0, 20.0)):
        simulation.add([cold(index)], 9, deadline=deadline)
    assert order_of_start(simulation) == [2, 3, 1, 0]


def test_the_longest_cached_prefix_starts_first_and_the_oldest_among_equals() -> None:
    simulation = Simulation(rows=1)
    simulation.add([cold(0, 12)], 13)
    simulation.run()
    for index, cached in enumerate((0, 5, 12, 8, 12)):
        simulation.add([cold(0, 12)[:cached] + cold(index + 1)], 25)
    assert order_of_start(simulation)[1:] == [3, 5, 4, 2, 1]


def test_behind_a_long_queue_it_is_first_come_first_served() -> None:
    simulation = Simulation(rows=1, pages=40)
    simulation.add([cold(0)], 9)
    simulation.run()
    blocker = simulation.add([cold(9)], 40)
    simulation.step()
    for index in range(QUEUE_WINDOW):
        simulation.add([cold(index + 10)], 9)
    [late] = indices(simulation.add([cold(0)], 9))
    simulation.cancel(blocker)
    order = order_of_start(simulation)
    # It was not looked at while the window was full of older ones, and came first as soon as it was.
    assert order.index(late) == 1 + 1


def test_a_cold_request_is_not_overtaken_for_ever_by_those_that_hit_the_cache() -> None:
    simulation = Simulation(rows=1, pages=60)
    simulation.add([cold(0, 16)], 17)
    simulation.run()
    [old] = indices(simulation.add([cold(1, 16)], 17))
    for newcomers in range(10 * MAX_BYPASSES):
        simulation.add([[*cold(0, 16), newcomers % 3]], 18)
        simulation.step()
        if old in simulation.finished:
            break
    assert simulation.finished.index(old) == 1 + MAX_BYPASSES


def test_a_large_request_is_not_starved_by_small_ones_that_would_fit() -> None:
    simulation = Simulation(rows=8, pages=12)
    simulation.add([cold(index) for index in range(3)], 12)
    simulation.step()
    [large] = indices(simulation.add([cold(9, 36)], 40))
    for index in range(20, 60):
        simulation.add([cold(index, 2)], 6)
        simulation.step()
        if large in simulation.finished:
            break
    assert large in simulation.finished


# Who gives way.


def squeeze(*jobs: tuple[list[int], int, int], pages: int = 9) -> tuple[Simulation, list[int]]:
    """Runs (prompt, length, priority) jobs side by side in a pool that becomes too small; answers who was sent back
    first, second, and so on."""
    simulation = Simulation(pages=pages, step_tokens=64)
    for prompt, length, priority in jobs:
        simulation.add([prompt], length, priority=priority)
    sent: list[int] = []
    preempt = simulation.scheduler._preempt

    def noting() -> None:
        before = list(simulation.scheduler.running)
        preempt()
        sent.extend(one.index for one in before if one not in simulation.scheduler.running)

    simulation.scheduler._preempt = noting  # type: ignore[method-assign]
    simulation.run()
    return simulation, sent


def test_the_youngest_of_equals_gives_way_and_the_oldest_is_never_sent_back() -> None:
    simulation, sent = squeeze(*((cold(index, 4), 24, 0) for index in range(3)))
    assert sent[0] == 2
    assert 0 not in sent
    assert simulation.finished[0] == 0


def test_the_lowest_priority_gives_way_first_whatever_it_costs() -> None:
    _, sent = squeeze((cold(0, 7), 24, -1), (cold(1, 4), 24, 0), (cold(2, 4), 24, 0))
    assert sent[0] == 0
    assert 1 not in sent


def test_of_equal_priority_the_one_that_loses_least_gives_way() -> None:
    _, sent = squeeze((cold(0, 3), 30, 0), (cold(1, 2), 30, 0), (cold(2, 7), 30, 0))
    assert sent[0] == 1


def test_what_others_hold_too_is_not_lost() -> None:
    shared = cold(0, 12)
    _, sent = squeeze((shared, 26, 0), ([*shared, 1], 26, 0), (cold(2, 8), 26, 0), pages=11)
    assert sent[0] == 1


def test_who_was_sent_back_does_not_return_before_somebody_has_left() -> None:
    simulation = Simulation(pages=10, step_tokens=64)
    simulation.add([cold(index, 4) for index in range(4)], 30)
    sent_back: dict[Sequence, int] = {}
    running: set[Sequence] = set()
    while simulation.busy:
        simulation.step()
        now, ended = set(simulation.scheduler.running), len(simulation.finished)
        assert all(ended > sent_back.pop(one, -1) for one in now - running)
        sent_back |= {one: ended for one in running - now if one in simulation.branches}
        running = now
    assert simulation.scheduler.num_preemptions > 0


def test_a_sequence_that_fills_the_whole_pool_alone_finishes() -> None:
    simulation = Simulation(pages=6, step_tokens=5)
    for index in range(3):
        simulation.add([cold(index, 10)], 6 * PAGE)
    simulation.run()
    assert sorted(simulation.finished) == [0, 1, 2]


def test_dropping_a_job_takes_out_those_that_run_and_those_that_wait() -> None:
    simulation = Simulation(rows=1)
    running, waiting = simulation.add([[1, 2, 3]], 9), simulation.add([[4, 5, 6]], 9)
    simulation.step()
    simulation.cancel(waiting)
    simulation.cancel(running)
    assert not simulation.busy
    assert simulation.cache.num_available_pages == simulation.cache.pool.size


def test_the_check_finds_tokens_that_were_not_computed() -> None:
    simulation = Simulation()
    simulation.add([list(range(10))], 30)
    simulation.step()
    [sequence] = simulation.scheduler.running
    sequence.tokens[2] = 99
    with pytest.raises(RuntimeError, match="other tokens"):
        simulation.scheduler.check_invariants()


def test_the_check_finds_a_sequence_that_was_lost() -> None:
    simulation = Simulation(rows=1)
    simulation.add([[1, 2], [3, 4]], 9)
    simulation.step()
    [job] = simulation.jobs
    job.waiting.clear()
    with pytest.raises(RuntimeError, match="queue"):
        simulation.scheduler.check_invariants()


PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(0, 2), st.integers(0, 20), st.integers(-1, 1))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.lists(PROMPTS, min_size=1, max_size=12), st.integers(10, 16), st.integers(1, 5), st.integers(1, 40), st.data()
)
def test_every_sequence_finishes_on_a_pool_that_can_hold_the_longest(
    shapes: list[tuple[int, int, int, int, int]], pages: int, rows: int, step_tokens: int, data: st.DataObject
) -> None:
    simulation = Simulation(pages=pages, rows=rows, step_tokens=step_tokens)
    for first, length, second, more, priority in shapes:
        prompt = ([first] * length + [second] * more)[: pages * PAGE]
        whole = min(len(prompt) + data.draw(st.integers(0, 20)), pages * PAGE)
        simulation.add([prompt], whole, priority=priority)
        if data.draw(st.booleans()):
            simulation.step()
    simulation.run()
    assert sorted(simulation.finished) == list(range(len(shapes)))
