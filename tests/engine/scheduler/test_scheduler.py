"""The scheduler without a model: token budgets, order, waiting for a shared prefix, and progress."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.scheduler import BACKGROUND_INTERVAL, MAX_BYPASSES, QUEUE_WINDOW
from engine.scheduler.sequence import Request, Sequence
from tests.engine.simulation import PAGE, Simulation


def cold(index: int, length: int = 8) -> list[int]:
    """Return a prompt that shares no prefix with those of other indices."""
    return [100 + index] * length


def indices(request: Request) -> list[int]:
    return [sequence.index for sequence in request.sequences]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    simulation = Simulation(step_tokens=10)
    simulation.add([list(range(25))], 25)
    assert [simulation.step() for _ in range(3)] == [[(0, 10)], [(0, 10)], [(0, 5)]]


def test_running_and_new_sequences_share_one_step() -> None:
    simulation = Simulation(step_tokens=10)
    simulation.add([[1, 2]], 9)
    simulation.step()
    simulation.add([list(range(10, 30))], 20)
    assert simulation.step() == [(0, 1), (1, 9)]


def test_a_long_prompt_of_higher_priority_does_not_stall_decoding() -> None:
    simulation = Simulation(step_tokens=10)
    simulation.add([[1], [2]], 40)
    simulation.step()
    simulation.add([list(range(100))], 120, priority=1)
    for _ in range(10):
        assert dict(simulation.step()) == {0: 1, 1: 1, 2: 8}


def test_decoding_leaves_a_quarter_of_the_step_to_prompts() -> None:
    simulation = Simulation(step_tokens=8, rows=16)
    simulation.add([[index] for index in range(10)], 40)
    for _ in range(2):
        simulation.step()
    simulation.add([cold(0, 6)], 20)
    assert dict(simulation.step())[10] == 2
    assert dict(simulation.step())[10] == 2


def test_a_step_of_one_token_decodes_if_no_prompt_fits_in_memory() -> None:
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


def test_hundreds_of_siblings_wait_for_the_first_while_other_jobs_start() -> None:
    simulation = Simulation(step_tokens=64, rows=64, pages=200)
    simulation.add([list(range(61))] * 300, 62)
    simulation.add([cold(1, 3)], 5)
    assert simulation.step() == [(0, 61), (300, 3)]
    assert [count for index, count in simulation.step() if index < 300] == [1] * 63


def test_sequences_without_a_shared_prefix_start_before_those_that_wait_for_one() -> None:
    simulation = Simulation(step_tokens=20)
    simulation.add([list(range(16))], 20)
    simulation.add([list(range(16))], 20)
    simulation.add([[50, 51, 52]], 20)
    assert simulation.step() == [(0, 16), (2, 3)]
    assert (1, 1) in simulation.step()


def test_sequences_do_not_wait_for_a_short_common_prefix() -> None:
    simulation = Simulation()
    simulation.add([[1, 2, 3, 10, 11, 12]], 7)
    simulation.add([[1, 2, 3, 20, 21, 22]], 7)
    assert simulation.step() == [(0, 6), (1, 6)]


def test_sequences_do_not_wait_for_a_prefix_of_another_namespace() -> None:
    simulation = Simulation(step_tokens=64)
    simulation.add([list(range(16))], 20, namespace="a")
    simulation.add([list(range(16))], 20, namespace="b")
    assert simulation.step() == [(0, 16), (1, 16)]


# Order of admission.


def order_of_start(simulation: Simulation) -> list[int]:
    """Return the sequences in the order of their start, which is that of their end if one runs at a time."""
    simulation.run()
    return simulation.finished


def test_a_higher_priority_starts_first() -> None:
    simulation = Simulation(rows=1)
    for index, priority in enumerate((0, -1, 5, 0, 5)):
        simulation.add([cold(index)], 9, priority=priority)
    assert order_of_start(simulation) == [2, 4, 0, 3, 1]


def test_background_pauses_while_others_have_work_but_for_one_step_of_many() -> None:
    simulation = Simulation()
    simulation.add([[1], [2]], 90, priority=-1)
    for _ in range(3):
        assert simulation.step() == [(0, 1), (1, 1)]
    simulation.add([[3], [4]], 75)
    steps = [dict(simulation.step()) for _ in range(2 * BACKGROUND_INTERVAL)]
    shared = [index for index, step in enumerate(steps) if 0 in step]
    assert shared == [BACKGROUND_INTERVAL - 1, 2 * BACKGROUND_INTERVAL - 1]
    assert all(step.keys() >= {2, 3} for step in steps)
    simulation.run()
    assert simulation.finished[:2] == [2, 3]


def test_background_gives_its_rows_and_its_memory_to_others() -> None:
    simulation = Simulation(rows=2)
    simulation.add([cold(0, 4), cold(1, 4)], 60, priority=-1)
    simulation.step()
    simulation.add([[1, 2], [3, 4]], 9)
    assert [index for index, _ in simulation.step()] == [2, 3]
    simulation.run()
    assert simulation.finished[:2] == [2, 3]
    assert simulation.scheduler.num_preemptions == 2

    full = Simulation(pages=10)
    full.add([cold(0, 4), cold(1, 4)], 16, priority=-1)
    for _ in range(8):
        full.step()
    full.add([cold(2, 5 * PAGE)], 6 * PAGE)
    assert [index for index, _ in full.step()] == [2]
    full.run()
    assert full.finished[0] == 2


def test_background_is_not_preempted_for_others_of_its_kind_nor_for_rows_that_are_free() -> None:
    simulation = Simulation(rows=3)
    simulation.add([cold(0, 4), cold(1, 4)], 30, priority=-1)
    simulation.step()
    simulation.add([[1, 2]], 9)
    simulation.add([[3, 4]], 9, priority=-1)
    simulation.run()
    assert simulation.scheduler.num_preemptions == 0
    assert simulation.finished[0] == 2


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


def test_beyond_the_queue_window_jobs_start_first_come_first_served() -> None:
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
    # It was outside the window of ranked requests until one of them had started, and then was ranked first.
    assert order.index(late) == 1 + 1


def test_a_request_without_cache_hit_is_bypassed_a_bounded_number_of_times() -> None:
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


def test_a_large_request_is_not_starved_by_small_ones_that_fit() -> None:
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


# Preemption.


def squeeze(*requests: tuple[list[int], int, int], pages: int = 9) -> tuple[Simulation, list[int]]:
    """Run (prompt, length, priority) requests together in a pool that becomes too small.

    Returns the simulation and the indices of the preempted sequences in order."""
    simulation = Simulation(pages=pages, step_tokens=64)
    for prompt, length, priority in requests:
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


def test_the_youngest_of_equals_is_preempted_and_the_oldest_never() -> None:
    simulation, sent = squeeze(*((cold(index, 4), 24, 0) for index in range(3)))
    assert sent[0] == 2
    assert 0 not in sent
    assert simulation.finished[0] == 0


def test_the_lowest_priority_is_preempted_first_at_any_cost() -> None:
    _, sent = squeeze((cold(0, 7), 24, -1), (cold(1, 4), 24, 0), (cold(2, 4), 24, 0))
    assert sent[0] == 0
    assert 1 not in sent


def test_among_equal_priorities_the_cheapest_to_recompute_is_preempted() -> None:
    _, sent = squeeze((cold(0, 3), 30, 0), (cold(1, 2), 30, 0), (cold(2, 7), 30, 0))
    assert sent[0] == 1


def test_shared_pages_do_not_count_as_cost_of_preemption() -> None:
    shared = cold(0, 12)
    _, sent = squeeze((shared, 26, 0), ([*shared, 1], 26, 0), (cold(2, 8), 26, 0), pages=11)
    assert sent[0] == 1


def test_a_preempted_sequence_restarts_only_after_another_has_finished() -> None:
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


def test_removing_a_job_removes_running_and_waiting_sequences() -> None:
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


def test_the_check_finds_a_lost_sequence() -> None:
    simulation = Simulation(rows=1)
    simulation.add([[1, 2], [3, 4]], 9)
    simulation.step()
    [request] = simulation.requests
    request.waiting.clear()
    with pytest.raises(RuntimeError, match="queue"):
        simulation.scheduler.check_invariants()


PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(0, 2), st.integers(0, 20), st.integers(-1, 1))


@settings(deadline=None, derandomize=True)
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
