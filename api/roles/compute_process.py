"""Computation in a child process, since this one has no torch, with a progress bar.

The child writes JSON lines: ``{"done", "total", "next"}`` as progress, then ``{"result"}`` or ``{"error"}``, the latter
with ``"usage": true`` if the arguments are wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.installation import require_engine
from engine.protocol.types import EngineError
from workers.processes.children import read_tail, stop

_STOP_SECONDS = 5.0


def compute(module: str, request: dict[str, Any], console: Console, *, grace: float = _STOP_SECONDS) -> Any:
    """Run ``python -m module`` with a progress bar and return its result. Exit the command if it fails.

    ``grace``: the time in seconds that the process has to end in order after Ctrl-C.
    """
    try:
        require_engine("this command")
        return _run_process(module, request, console, grace)
    except (EngineError, _FailedError) as error:
        console.print(f"reasoner: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(error.status if isinstance(error, _FailedError) else 1) from None


class _FailedError(Exception):
    """Failure reported by the process, with the command's exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def _run_process(module: str, request: dict[str, Any], console: Console, grace: float) -> Any:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="reasoner-") as folder, Progress(*columns, console=console) as progress:
        task, result, log = progress.add_task("starting", total=None), None, Path(folder) / "log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(request)],
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        try:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in map(json.loads, lines):
                    if "error" in line:
                        raise _FailedError(line["error"], 2 if line.get("usage") else 1)
                    if "result" in line:
                        result = line["result"]
                    else:
                        progress.update(task, completed=line["done"], total=line["total"], description=line["next"])
            if process.wait() != 0:
                raise _FailedError(
                    f"the process that computes ended with status {process.returncode}:\n{read_tail(log)}"
                )
        finally:
            stop(process, grace=grace)
    return result
