"""One thread while other processes need the cores, else all threads; tokens do not depend on the number."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine.threads.contention import (
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    WINDOW_SECONDS,
    ThreadGovernor,
    waiting_clock,
)


class Machine:
    """A clock, and threads that wait for a core for a ``share`` of the time if there are several."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.threads = 4
        self.now = self.waited = 0.0
        self.governor = ThreadGovernor(4, self.use, lambda: self.waited, lambda: self.now)
        self.trials: list[float] = []

    def use(self, threads: int) -> None:
        if threads > 1:
            self.trials.append(self.now)
        self.threads = threads

    def work(self, seconds: float, step: float = 0.01) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += step
            self.waited += self.share * step if self.threads > 1 else 0.0
            self.governor.step()


@pytest.mark.parametrize("step", [0.001, 0.01, 0.7])
def test_all_threads_compute_on_an_idle_machine(step: float) -> None:
    machine = Machine(share=0.1)
    machine.work(5, step)
    assert machine.threads == 4
    assert not machine.trials


def test_one_thread_computes_on_a_busy_machine_and_trials_of_all_threads_become_rarer() -> None:
    machine = Machine(share=0.6)
    machine.work(3 * WINDOW_SECONDS)
    assert machine.threads == 1
    machine.work(100)
    pauses = [after - before for before, after in zip(machine.trials, machine.trials[1:], strict=False)]
    assert [round(pause / FIRST_PAUSE_SECONDS) for pause in pauses[:4]] == [2, 4, 8, 16]
    assert max(pauses) < MAX_PAUSE_SECONDS + 4 * WINDOW_SECONDS


def test_all_threads_compute_again_after_other_processes_end() -> None:
    machine = Machine(share=0.6)
    machine.work(10)
    machine.share = 0.0
    machine.work(MAX_PAUSE_SECONDS)
    assert machine.threads == 4
    machine.share = 0.6
    machine.work(FIRST_PAUSE_SECONDS / 2)
    trials = len(machine.trials)
    machine.work(FIRST_PAUSE_SECONDS)
    assert len(machine.trials) == trials + 1  # pauses start from the first length again


def test_short_disturbances_do_not_reduce_the_threads() -> None:
    machine = Machine(share=0.0)
    for _ in range(20):
        machine.waited += WINDOW_SECONDS
        machine.work(2.5 * WINDOW_SECONDS)
    assert machine.threads == 4


def test_idle_time_is_not_measured() -> None:
    machine = Machine(share=0.0)
    machine.work(0.5)
    machine.now += 60
    machine.waited += 50
    machine.governor.begin()
    machine.work(0.5)
    assert machine.threads == 4


def test_the_waiting_time_of_threads_is_read_from_the_kernel_where_available(tmp_path: Path) -> None:
    for name, nanoseconds in (("7", 2_000_000_000), ("9", 500_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(f"123 {nanoseconds} 4\n")
    clock = waiting_clock([7, 9], tmp_path)
    assert clock is not None
    assert clock() == 2.5
    assert waiting_clock([8], tmp_path) is None
    own = waiting_clock([threading.get_native_id()])
    assert own is None or own() >= 0


def test_threads_of_the_pool_are_listed_by_the_system() -> None:
    torch = pytest.importorskip("torch")
    launch = pytest.importorskip("kernels.cpu.runtime.kernel")
    found: list[list[int]] = []

    def ask() -> None:
        torch.set_num_threads(2)
        found.append(launch.thread_ids())
        torch.set_num_threads(1)
        found.append(launch.thread_ids())

    thread = threading.Thread(target=ask)  # each calling thread has a pool of its own
    thread.start()
    thread.join()
    several, single = found
    assert len(single) == 1
    assert len(set(several)) == len(several)
    assert set(single) <= set(several)
    assert len(several) == (1 if launch._get_pool() is None else 2)
