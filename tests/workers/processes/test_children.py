"""Child processes: a signal that arrives during a start is not lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# The signal is sent in the fork hooks, where the interpreter drops exceptions.
SCRIPT = """
import os, signal, sys
from pathlib import Path
from workers.processes.children import spawn, stop

def leave(number, _):
    raise SystemExit(40)

number = int(sys.argv[1])
if number == signal.SIGTERM:
    signal.signal(number, leave)
os.register_at_fork(**{sys.argv[2]: lambda: os.kill(os.getpid(), number)})
child = None
try:
    child = spawn([sys.executable, "-c", "pass"], log=Path(sys.argv[3]), death_signal=signal.SIGKILL)
except KeyboardInterrupt:
    sys.exit(40)
finally:
    if child is not None:
        stop(child, grace=10.0)
"""


@pytest.mark.parametrize("number", [2, 15])
@pytest.mark.parametrize("moment", ["before", "after_in_parent"])
def test_a_signal_during_a_fork_takes_effect(number: int, moment: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(number), moment, str(tmp_path / "log")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[3])
    assert (ended.returncode, ended.stderr) == (40, "")
