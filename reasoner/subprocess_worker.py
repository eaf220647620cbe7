"""The main loop of a worker process, which handles one request at a time within limits.

Its parent's side is ``reasoner.subprocess_pool``.
"""

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
"""Maximum time of one request in a worker whose parent has died and cannot kill it."""


def serve(handle: Callable[[Any], Any], memory_bytes: int = MEMORY_BYTES) -> None:
    """Handle JSON lines from stdin and reply on stdout until stdin ends. An exception replies ``False``.

    A request that exhausts the memory ends the process. One that leaves half of it in use ends the process after its
    reply, since the next request might fail for lack of memory.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # printed text must not be taken for a reply
    _limit_memory(memory_bytes)
    with contextlib.suppress(ConnectionError):  # the parent is gone
        print("true", file=out, flush=True)  # ready
        for line in sys.stdin:
            cpu_seconds, request = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # without a handler these signals end the process
            signal.setitimer(signal.ITIMER_REAL, _ORPHANED_SECONDS)
            try:
                reply = handle(request)
            except MemoryError:
                os._exit(1)
            except Exception:  # whatever fails inside of a library, the request is not confirmed
                reply = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            exits = _peak_memory() > memory_bytes // 2
            print(json.dumps([reply, exits]), file=out, flush=True)
            if exits:
                return


def _peak_memory() -> int:
    """Return the peak memory of this program in bytes."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux, ru_maxrss starts at what the parent used when it started this process.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) << 10


def _limit_memory(max_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        max_bytes = min(hard, max_bytes)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, hard))
    except (ValueError, OSError) as error:  # macOS has no such limit
        print(f"the memory of this process is not limited: {error}", file=sys.stderr)
