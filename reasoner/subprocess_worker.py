"""A child process's own side: it answers one question at a time, within limits. Its parent's:
``reasoner.subprocess_pool``."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY_BYTES = 2 << 30
_ORPHANED_SECONDS = 120.0
"""Longest time for one question in a child whose parent is no longer there to kill it."""


def serve(answer: Callable[[Any], Any], memory_bytes: int = MEMORY_BYTES) -> None:
    """Answer JSON lines from stdin on stdout until stdin ends. An exception answers ``False``.

    A question that uses up the memory ends the process, and so does, behind its answer, one that leaves half of it in
    use: the next question might fail for want of what this one took.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whoever prints does not answer
    _limit_memory(memory_bytes)
    with contextlib.suppress(ConnectionError):  # the parent is gone
        print("true", file=out, flush=True)  # ready
        for line in sys.stdin:
            patience, question = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, patience)  # nobody handles these signals: the system ends the process
            signal.setitimer(signal.ITIMER_REAL, _ORPHANED_SECONDS)
            try:
                reply = answer(question)
            except MemoryError:
                os._exit(1)
            except Exception:  # whatever the question does to the libraries, it is not shown to hold
                reply = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            last = _memory_used() > memory_bytes // 2
            print(json.dumps([reply, last]), file=out, flush=True)
            if last:
                return


def _memory_used() -> int:
    """Return the bytes of the most that this program ever held."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux' ru_maxrss begins with what the parent held when it started this process.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) << 10


def _limit_memory(most: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        most = min(hard, most)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    except (ValueError, OSError) as error:  # macOS has no such limit
        print(f"the memory of this process is not limited: {error}", file=sys.stderr)
