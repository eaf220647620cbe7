"""Signals: the first ends a command in order, a second Ctrl-C at once, and later ones change nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
PRELUDE = """
import asyncio, os, select, signal, sys, time
from pathlib import Path
from workers.processes.shutdown import interruptible, is_forced, run, uninterrupted
from workers.processes.children import spawn, stop
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
def say(word):
    os.write(1, word.encode() + b"\\n")
# A signal that comes just before a system call blocks is handled when it returns: none here blocks for long.
def stay():
    while True:
        time.sleep(0.02)
def wait():
    say("waiting")
    stay()
def await_line():
    while not select.select([0], [], [], 0.02)[0]:
        pass
"""
CLEANUP = """
with interruptible():
    try:
        wait()
    finally:
        with uninterrupted():
            say("cleanup")
            await_line()
            say("cleaned")
"""
STUCK = """
with interruptible():
    try:
        wait()
    finally:
        say("cleanup")
        stay()  # a thread that never ends, an answer that never comes
"""
HELD_BACK = """
with interruptible():
    with uninterrupted():
        say("waiting")
        await_line()
        say("whole")
    say("never")
"""
COROUTINE = """
async def main():
    try:
        say("waiting")
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        say("closed")
with interruptible():
    run(main())
"""
CHILD = """
with interruptible():
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"
    log = Path(sys.argv[1])
    child = spawn([sys.executable, "-c", script], log=log, death_signal=signal.SIGKILL)
    while not log.stat().st_size:
        pass
    try:
        say(str(child.pid))
        wait()
    finally:
        with uninterrupted():
            say("cleanup")
            stop(child, grace=3600)
            say("stopped")
"""
DROPPED = """
class Ends:
    def __del__(self):
        say("waiting")
        await_line()
with interruptible():
    try:
        Ends()
        stay()
    finally:
        say("cleanup")
"""
RESTORED = """
def earlier(dropped):
    say(dropped.exc_type.__name__)
class Ends:
    def __del__(self):
        raise ValueError
sys.unraisablehook = earlier
with interruptible():
    Ends()
assert sys.unraisablehook is earlier
"""
ENDED = """
with interruptible():
    pass
wait()
"""


class Running:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def says(self, *words: str) -> None:
        """Wait for these lines."""
        assert self.process.stdout is not None
        assert [self.process.stdout.readline().rstrip() for _ in words] == list(words)

    def get(self, *numbers: int) -> None:
        for number in numbers:
            self.process.send_signal(number)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ends(self, status: int, *words: str) -> None:
        assert self.process.stdout is not None
        assert (self.process.wait(30), self.process.stdout.read().splitlines()) == (status, list(words))


@contextmanager
def running(script: str, *arguments: object) -> Iterator[Running]:
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "status"), [(INT, -INT), (TERM, 143), (HUP, 129)])
def test_a_signal_during_a_finalizer_is_not_lost(number: int, status: int) -> None:
    """The interpreter drops exceptions raised in finalizers."""
    with running(DROPPED) as command:
        command.says("waiting")
        command.get(number)
        command.ends(status, "cleanup")


def test_other_dropped_exceptions_are_reported_as_before() -> None:
    with running(RESTORED) as command:
        command.ends(0, "ValueError")


@pytest.mark.parametrize(("number", "status"), [(INT, -INT), (TERM, 143), (HUP, 129)])
def test_the_first_signal_shuts_down_in_order(number: int, status: int) -> None:
    with running(CLEANUP) as command:
        command.says("waiting")
        command.get(number)
        command.says("cleanup")
        command.go_on()
        command.ends(status, "cleaned")


@pytest.mark.parametrize(("first", "status"), [(INT, 130), (TERM, 143)])
@pytest.mark.parametrize("script", [CLEANUP, STUCK])
def test_a_second_ctrl_c_ends_a_hanging_process_and_a_third_does_no_harm(script: str, first: int, status: int) -> None:
    with running(script) as command:
        command.says("waiting")
        command.get(first)
        command.says("cleanup")
        command.get(INT, INT)
        command.ends(status)


@pytest.mark.parametrize(("number", "status"), [(HUP, 129), (TERM, 143)])
def test_two_signals_of_a_terminal_or_service_manager_still_shut_down_in_order(number: int, status: int) -> None:
    with running(CLEANUP) as command:
        command.says("waiting")
        command.get(number)
        command.says("cleanup")
        command.get(number)
        command.go_on()
        command.ends(status, "cleaned")


def test_a_first_signal_during_cleanup_takes_effect_after_it() -> None:
    with running(HELD_BACK) as command:
        command.says("waiting")
        command.get(INT)
        command.go_on()
        command.ends(-INT, "whole")


def test_a_coroutine_is_cancelled_and_closes_its_context_managers() -> None:
    with running(COROUTINE) as command:
        command.says("waiting")
        command.get(INT)
        command.ends(-INT, "closed")


def test_a_child_that_does_not_end_is_killed_by_the_second_ctrl_c(tmp_path: Path) -> None:
    with running(CHILD, tmp_path / "log") as command:
        assert command.process.stdout is not None
        child = int(command.process.stdout.readline())
        command.says("waiting")
        command.get(INT)
        command.says("cleanup")
        command.get(INT)
        command.ends(-INT, "stopped")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_after_the_block_the_previous_handlers_are_restored() -> None:
    with running(ENDED) as command:
        command.says("waiting")
        command.get(TERM)
        command.ends(-TERM)
