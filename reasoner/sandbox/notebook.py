"""The process of a branch's cells: runs them in one namespace, and reports what the last one printed.

Uses the standard library only, since it runs in an interpreter of its own. The cells hold the pipe of the report, so
they can forge their own output, and nothing else.
"""

from __future__ import annotations

import ast
import builtins
import io
import os
import signal
import sys
import traceback
import types
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from reasoner.sandbox.wire import Pipe

MAX_WRITTEN = 64
"""Multiple of the output's limit after which a cell that goes on printing ends."""
OUTSIDE = "inside there are the standard library, numpy and sympy alone, and no files, network or processes"


class TimeIsUp(BaseException):
    """The time of the cells is used up."""


class TooMuchOutput(BaseException):
    """A cell has printed far more than its limit."""


class Output(io.TextIOBase):
    """The beginning and the end of a text of any length, which it counts."""

    def __init__(self, limit: int) -> None:
        self._room = limit - limit // 2
        self._limit = limit
        self._head = ""
        self._tail: deque[str] = deque()
        self._num_tail = 0
        self._num_written = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._num_written += len(text)
        taken = text[: self._room]
        self._head, self._room = self._head + taken, self._room - len(taken)
        rest = text[len(taken) :][-self._limit :]
        if rest:
            self._tail.append(rest)
            self._num_tail += len(rest)
            while self._num_tail - len(self._tail[0]) >= self._limit // 2:
                self._num_tail -= len(self._tail.popleft())
        if self._num_written > MAX_WRITTEN * self._limit:
            raise TooMuchOutput
        return len(text)

    def read_all(self) -> str:
        """Return the text; where it is too long, a line in its middle says how many characters are left out."""
        tail = "".join(self._tail)[-(self._limit // 2) :] if self._num_written > self._limit else "".join(self._tail)
        left_out = self._num_written - len(self._head) - len(tail)
        return f"{self._head}\n[{left_out} characters left out]\n{tail}" if left_out else self._head + tail


def run_notebook(cells: list[str], limit: int, seconds: float, pipe: Pipe) -> None:
    """Run the cells and send ``{"output", "ended"}`` of the last one. ``limit``: of its output, in characters."""
    if "random" in sys.modules:
        sys.modules["random"].seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    ended, output = "ok", Output(limit)
    for number, code in enumerate(cells, 1):
        output = Output(limit)
        sys.stdout = sys.stderr = output
        ended = _run_cell(code, number, module, output)
        if ended in ("timeout", "output") and number < len(cells):
            output = Output(limit)
            output.write(f"cell {number}, which had run before, used up the time of {seconds:g} seconds\n")
            break
    text = output.read_all().encode("utf-8", "replace").decode()
    pipe.send({"output": text, "ended": ended})


def prepare_alarm() -> None:
    """End a cell with ``TimeIsUp`` at the alarm, and the process at the next one. Before the lockdown only."""
    has_rung = False

    def ring(*_: Any) -> NoReturn:
        nonlocal has_rung
        if has_rung:
            os._exit(1)
        has_rung = True
        raise TimeIsUp

    signal.signal(signal.SIGALRM, ring)


def start_alarm(seconds: float) -> None:
    """Start the time of the cells. Before the lockdown only."""
    signal.setitimer(signal.ITIMER_REAL, seconds, 2.0)


def _run_cell(code: str, number: int, module: types.ModuleType, output: Output) -> str:
    """Run a cell and return how it ended; its last expression is printed unless it is ``None``."""
    try:
        for run in _compile(code, f"<cell {number}>"):
            run(module.__dict__)
    except TimeIsUp:
        return "timeout"
    except TooMuchOutput:
        return "output"
    except BaseException as error:
        try:
            _report(error, output)
        except BaseException:  # an exception whose text raises another one, or no memory for it
            return "error"
        return "memory" if isinstance(error, MemoryError) else "error"
    return "ok"


def _compile(code: str, name: str) -> list[Callable[[dict[str, Any]], None]]:
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    steps: list[Callable[[dict[str, Any]], None]] = []
    body = compile(tree, name, "exec", dont_inherit=True)
    steps.append(lambda scope: exec(body, scope))
    if isinstance(last, ast.Expr):
        expression = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
        steps.append(lambda scope: _show(eval(expression, scope)))
    return steps


def _show(value: Any) -> None:
    if value is not None:
        builtins.print(repr(value))


def _report(error: BaseException, output: Output) -> None:
    """Print the lines of the cells that led to an exception, and the exception."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<cell ")]
    shown = frames if len(frames) <= 4 else [*frames[:1], *frames[-3:]]
    for frame in shown:
        place = "" if frame.name == "<module>" else f", in {frame.name}"
        output.write(f'File "{frame.filename}", line {frame.lineno}{place}\n')
    output.write("".join(traceback.format_exception_only(type(error), error)))
    if isinstance(error, (ImportError, PermissionError)):
        output.write(f"({OUTSIDE})\n")
