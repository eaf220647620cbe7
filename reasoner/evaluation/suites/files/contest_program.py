"""Contest solutions in the sandbox: programs from standard input to standard output, and methods of ``Solution``.

The answer's process has the inputs and hands out what the answer made of them, in pieces that fit the sandbox's pipe;
the tester's process has the expected outputs and compares. Outputs of programs are compared line by line without outer
white space, and a line also by its numbers, as LiveCodeBench does; results of functions as JSON.
"""

from __future__ import annotations

import keyword
import re

from reasoner.evaluation.suites.files.code_tests import CodeTask
from reasoner.evaluation.suites.problem import Problem
from reasoner.sandbox.runner import Limits

STDIN, FUNCTIONAL = "stdin", "functional"
SECONDS_PER_TEST = 6.0
"""As in LiveCodeBench."""
MAX_SECONDS = 120.0
MEMORY_BYTES = 1 << 30
PIECE_CHARS = 100_000

_IMPORT = re.compile(r"^\s*(?:from|import)\s+([A-Za-z_][\w.]*(?:\s*,\s*[A-Za-z_][\w.]*)*)", re.MULTILINE)
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
"""Modules that a solution may use without an import, and their names, as with LiveCodeBench's own runner."""
_STAR_MODULES = (*_MODULES, "builtins", "typing")

_SOLVER = """
import builtins, importlib, io, json, sys
if False:
    {preloaded}
sys.setrecursionlimit(50_000)
_ANSWER, _INPUTS, _FUNCTION = {answer!r}, {inputs!r}, {function!r}
_text = ""

def _open(file, *args, **named):
    return sys.stdin if file == 0 else builtins.open(file, *args, **named)

def _load(name):
    names = {{"__name__": name}}
    for module in {stars!r}:
        exec("from " + module + " import *", names)
    names.update({{module: importlib.import_module(module) for module in {modules!r}}})
    names["open"] = _open
    exec(compile(_ANSWER, "<answer>", "exec", dont_inherit=True), names)
    return names

def _call(text):
    names = _load("solution")
    holder = names["Solution"]() if "Solution" in names else None
    function = names[_FUNCTION] if holder is None else getattr(holder, _FUNCTION)
    return json.dumps(function(*(json.loads(line) for line in text.split("\\n") if line.strip())))

def _pipe(text):
    stdin, stdout, written = sys.stdin, sys.stdout, io.BytesIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
    output = sys.stdout = io.TextIOWrapper(written, encoding="utf-8")
    try:
        _load("__main__")
    except SystemExit:
        pass
    finally:
        sys.stdin, sys.stdout = stdin, stdout
    output.flush()
    return written.getvalue().decode()

def run(index):
    global _text
    _text = (_pipe if _FUNCTION is None else _call)(_INPUTS[index])
    return len(_text)

def read(start):
    return _text[start : start + {piece}]
"""

_TEST = """
import json
from decimal import Decimal, InvalidOperation

def _read_lines(text):
    return [line.strip() for line in text.strip().split("\\n")]

def _read_numbers(line):
    try:
        return [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None

def _agree(a, b):
    return a == b or (_read_numbers(a) is not None and _read_numbers(a) == _read_numbers(b))

text = "".join(read(start) for start in range(0, run({index}), {piece}))
expected = {expected!r}
if {compares_json}:
    assert json.loads(text) == json.loads(expected), "wrong result"
else:
    lines, wanted = _read_lines(text), _read_lines(expected)
    assert len(lines) == len(wanted), "wrong number of lines"
    assert all(map(_agree, lines, wanted)), "wrong output"
"""


def build_task(problem: Problem, answer: str) -> CodeTask:
    """Return the sandbox's task for an answer to a contest problem."""
    function, outputs = problem.data["function"], problem.data["outputs"]
    imported = _list_imports(answer)
    code = _SOLVER.format(
        preloaded="import " + ", ".join((*_STAR_MODULES, *imported)),
        answer=answer,
        inputs=problem.data["inputs"],
        function=function,
        stars=_STAR_MODULES,
        modules=_MODULES,
        piece=PIECE_CHARS,
    )
    tests = [
        _TEST.format(index=index, piece=PIECE_CHARS, expected=expected, compares_json=function is not None)
        for index, expected in enumerate(outputs)
    ]
    seconds = min(MAX_SECONDS, SECONDS_PER_TEST * len(tests))
    return CodeTask(code, tests, Limits(seconds, MEMORY_BYTES))


def _list_imports(code: str) -> list[str]:
    """Return the modules that a text may import; the sandbox loads those of the standard library before it closes."""
    names = {name for group in _IMPORT.findall(code) for name in re.split(r"\s*,\s*", group)}
    return sorted(name for name in names if not any(map(keyword.iskeyword, name.split("."))))
