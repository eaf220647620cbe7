"""Entry point of solver, tester and notebook: ``python -s -S -P main.py`` with the task as one JSON document on stdin.

In order: resource limits, the imports that the untrusted code will need, the lockdown, the untrusted code.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from reasoner.sandbox.notebook import prepare_alarm, run_notebook, start_alarm
from reasoner.sandbox.packages import import_packages
from reasoner.sandbox.restrict import LockdownUnavailable, limit_resources, lock_down
from reasoner.sandbox.solver import solve
from reasoner.sandbox.tester import test
from reasoner.sandbox.wire import Pipe

START_SECONDS = 60.0
"""Time for the imports of a notebook, before its own begins."""
_NEEDED_LATER = ("_strptime", "encodings.idna", "encodings.latin_1", "encodings.ascii", "encodings.utf_16")
"""Modules that the standard library imports on first use."""
_WITH_EFFECTS = frozenset({"antigravity", "idlelib", "turtle", "turtledemo", "tkinter", "this", "test", "ensurepip"})


def main() -> None:
    task = json.loads(sys.stdin.buffer.read())
    role = task["role"]
    limit_resources(task["seconds"] + (START_SECONDS if role == "notebook" else 0), task["memory_bytes"])
    sources = [task["code"]] if role == "solver" else task["tests" if role == "tester" else "cells"]
    del sys.path[0]
    for source in sources:
        preload(source, packages=role == "notebook")
    pipe = Pipe(task.get("reads", -1), task["writes"])
    if role == "notebook":
        prepare_alarm()
        start_alarm(task["seconds"])
    if task["locked"]:
        try:
            lock_down()
        except LockdownUnavailable as error:
            report = task.get("results", task["writes"])
            if role != "solver":  # which fails in the same way, but only the tester can report it
                os.write(report, json.dumps({"refused": str(error)}).encode() + b"\n")
            os._exit(1)
    if role == "solver":
        solve(task["code"], pipe)
    elif role == "tester":
        test(task["tests"], pipe, task["results"])
    else:
        pipe.send({"ready": True})
        run_notebook(task["cells"], task["output_chars"], task["seconds"], pipe)
    os._exit(0)


def preload(source: str, *, packages: bool) -> None:
    """Import the standard library modules that ``source`` names, also those of ``packages``, and no others."""
    wanted = set(_NEEDED_LATER)
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                wanted |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    if packages:
        import_packages(wanted)
    for name in sorted(wanted):
        root = name.partition(".")[0]
        if root in sys.stdlib_module_names and root not in _WITH_EFFECTS:
            with contextlib.suppress(ImportError):  # ``name`` may be a function of a module
                importlib.import_module(name)


if __name__ == "__main__":
    main()
