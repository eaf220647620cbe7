"""Cells of a branch: one namespace, their output and errors, the limits, and the same walls as for tested code."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from reasoner.sandbox.cells import CellLimits, CellResult, run_cells
from reasoner.sandbox.notebook import OUTSIDE
from tests.long import mostly_long
from tests.reasoner.sandbox.test_sandbox import SYSTEM_CALLS, TRIES, children
from tests.seeds import keep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the lock is Linux's")

QUICK = CellLimits(seconds=1.0, memory_bytes=256 << 20)


async def run(*cells: str, limits: CellLimits = CellLimits()) -> CellResult:
    return await run_cells(cells, limits)


@pytest.fixture(autouse=True)
def nothing_survives() -> Iterator[None]:
    """Check that no process of a sandbox outlives its call."""
    yield
    assert not children(os.getpid())


@pytest.mark.parametrize(
    ("cells", "output"),
    [
        (["print(1 + 1)"], "2\n"),
        (["x = 5", "x * 2"], "10\n"),
        (["print('a')\n'b'"], "a\n'b'\n"),
        (["None"], ""),
        (["x = 1", "x += 1", "print(x)\nimport sys\nprint('e', file=sys.stderr)"], "2\ne\n"),
        (["def f(n):\n    return n and n * f(n - 1) or 1", "f(20)"], "2432902008176640000\n"),
        (["1 / 0", "print('on')"], "on\n"),
        (["print(__name__)"], "__main__\n"),
        (["print('é🙂')"], "é🙂\n"),
        ([""], ""),
        (["import re, json, math, datetime, heapq, statistics, itertools, fractions, decimal\nmath.gcd(4, 6)"], "2\n"),
        (["from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int", "A(3)"], "A(x=3)\n"),
    ],
)
async def test_the_last_cell_shows_what_it_prints_and_its_value(cells: list[str], output: str) -> None:
    result = await run(*cells)
    assert (result.output, result.ended) == (output, "ok")


@pytest.mark.parametrize(
    ("cells", "output"),
    [
        (["print('so far')\n1 / 0"], 'so far\nFile "<cell 1>", line 2\nZeroDivisionError: division by zero\n'),
        (
            ["def f():\n    return [][1]", "f()"],
            'File "<cell 2>", line 1\nFile "<cell 1>", line 2, in f\nIndexError: list index out of range\n',
        ),
        (["import sys\nprint('a'); sys.exit(2)"], 'a\nFile "<cell 1>", line 2\nSystemExit: 2\n'),
        (["raise KeyboardInterrupt"], 'File "<cell 1>", line 1\nKeyboardInterrupt\n'),
        (["input()"], 'File "<cell 1>", line 1\nEOFError: EOF when reading a line\n'),
        (
            ["import requests"],
            f"File \"<cell 1>\", line 1\nModuleNotFoundError: No module named 'requests'\n({OUTSIDE})\n",
        ),
        (["\x00"], "SyntaxError: source code string cannot contain null bytes\n"),
    ],
)
async def test_an_error_is_shown_with_the_lines_of_the_cells(cells: list[str], output: str) -> None:
    result = await run(*cells)
    assert (result.output, result.ended) == (output, "error")


async def test_a_syntax_error_and_a_deep_recursion_end_their_cell_alone() -> None:
    assert "SyntaxError" in (await run("(")).output
    deep = await run("def f(x):\n    return f(x)\nf(1)")
    assert deep.output.endswith("RecursionError: maximum recursion depth exceeded\n")
    assert deep.output.count("\n") == 5
    nested = await run("(" * 5000)
    assert nested.ended == "error"


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("while True:\n    pass", {"timeout"}),
        ("import time\ntime.sleep(1000)", {"timeout"}),
        ("x = 9**9**9**9", {"timeout", "memory"}),
        ("try:\n    while True:\n        pass\nexcept BaseException:\n    while True:\n        pass", {"timeout"}),
        ("while True:\n    print('x' * 1000)", {"output"}),
        ("print('x' * (1 << 30))", {"output", "memory"}),
        ("x = bytearray(1 << 40)", {"memory"}),
        ("x = [0]\nwhile True:\n    x += x", {"memory"}),
        ("import os\nwhile True:\n    os.fork()", {"error"}),
        ("import threading\nwhile True:\n    threading.Thread(target=print).start()", {"error"}),
        ("import os\nos._exit(0)", {"died"}),
        ("import os\nos.closerange(0, 64)\nprint(5)", {"died"}),
        ("import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)", {"error"}),
        ("import ctypes\nctypes.string_at(0)", {"died"}),
    ],
)
async def test_no_cell_exceeds_its_limits(code: str, ended: set[str]) -> None:
    assert (await run(code, limits=QUICK)).ended in ended


async def test_what_was_printed_before_the_time_was_up_is_shown() -> None:
    result = await run("print('early')\nwhile True:\n    pass", limits=QUICK)
    assert (result.output, result.ended) == ("early\n", "timeout")
    used_up = await run("while True:\n    pass", "print(1)", limits=QUICK)
    assert used_up.ended == "timeout"
    assert "cell 1, which had run before, used up the time of 1 seconds" in used_up.output


async def test_a_long_output_keeps_its_beginning_and_its_end() -> None:
    result = await run("for i in range(1000):\n    print(i)", limits=CellLimits(output_chars=100))
    text = "".join(f"{i}\n" for i in range(1000))
    assert result.output == f"{text[:50]}\n[{len(text) - 100} characters left out]\n{text[-50:]}"
    short = await run("print('a' * 99)", limits=CellLimits(output_chars=100))
    assert short.output == "a" * 99 + "\n"


async def test_the_same_cells_find_the_same_state() -> None:
    cells = ["import random\nx = random.random()", "print(x, hash('a'), random.randrange(10**9), {'b', 'a', 'c'})"]
    first, second = await asyncio.gather(run(*cells), run(*cells))
    assert first.output == second.output
    random.seed(keep(0, "the sandbox's own seed"))
    assert first.output.startswith(str(random.random()))


@pytest.mark.skipif(find_spec("numpy") is None, reason="numpy is not installed")
async def test_numpy_is_available_inside() -> None:
    code = (
        "import numpy as np\n"
        "print(np.linalg.solve([[1, 2], [3, 4]], [1, 1]), np.fft.fft([1, 2]).real, np.sort([3, 1]))\n"
        "print(np.random.default_rng(0).integers(9), np.array([1.5, 2]).std(), np.median([1, 5, 9]))"
    )
    result = await run(code)
    assert (result.output, result.ended) == ("[-1.  1.] [ 3. -1.] [1 3]\n7 0.25 5.0\n", "ok")


@pytest.mark.skipif(find_spec("sympy") is None, reason="sympy is not installed")
async def test_sympy_is_available_inside_with_the_modules_that_it_imports_late() -> None:
    code = (
        "from sympy import *\nx, y = symbols('x y')\nf = Function('f')\n"
        "print(solve(x**2 - 2, x), integrate(sin(x) * exp(x), x), factorint(2**64 + 1), limit(sin(x) / x, x, 0))\n"
        "print(Matrix([[1, 2], [2, 1]]).eigenvals(), latex(x**2 / 3), N(pi, 20), dsolve(f(x).diff(x) - f(x), f(x)))\n"
        "print(diophantine(x**2 - y**2 - 3), apart(1 / (x * (x + 1))), groebner([x**2 - y], x, y).exprs, isprime(97))\n"
        "print(nsolve(cos(x) - x, 1), Sum(x, (x, 1, 10)).doit(), lambdify(x, x**2)(3))"
    )
    result = await run(code, limits=CellLimits(seconds=60))
    assert result.ended == "ok", result.output
    assert result.output.splitlines()[0] == (
        "[-sqrt(2), sqrt(2)] exp(x)*sin(x)/2 - exp(x)*cos(x)/2 {274177: 1, 67280421310721: 1} 1"
    )


@pytest.mark.parametrize(("module", "attempt"), mostly_long(SYSTEM_CALLS, every=4))
async def test_cells_are_refused_the_same_system_calls(module: str, attempt: str, tmp_path: Path) -> None:
    marker, victim = tmp_path / "marker", tmp_path / "victim"
    victim.write_text("secret")
    victim.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"marker": str(marker), "victim": str(victim), "parent": os.getpid(), "port": server.getsockname()[1]}
        code = TRIES.format(module=module, attempt=attempt.format(**names))
        result = await run("import numpy\n" * (find_spec("numpy") is not None) + code + "\nprint(tried())")
    assert result.output in ("refused\n", "OSError\n", "ValueError\n")
    assert os.listdir(tmp_path) == [victim.name]
    assert victim.read_text() == "secret"
    assert victim.stat().st_mode & 0o777 == 0o644


async def test_a_forged_report_is_no_more_than_the_cells_own_output() -> None:
    report = '{"output": "forged", "ended": "fine"}'
    write = f"os.write(fd, b'{report}\\n')"
    forge = f"import os\nfor fd in range(64):\n    try:\n        {write}\n    except OSError:\n        pass"
    result = await run(forge)
    assert (result.output, result.ended) == ("forged", "died")
    flood = "import os\nwhile True:\n    for fd in range(64):\n        try:\n            os.write(fd, b'x' * 65536)\n"
    result = await run(flood + "        except OSError:\n            pass", limits=QUICK)
    assert result.ended in ("died", "timeout")


async def test_the_environment_is_empty_and_a_patched_builtin_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REASONER_API_KEYS", "a-secret-of-the-worker")
    code = "import os, sys, builtins\nprint(dict(os.environ), sys.argv, sys.path)\nbuiltins.repr = builtins.len = None"
    result = await run(code)
    assert "secret" not in result.output
    assert "site-packages" not in result.output
    assert (await run("len([1])")).output == "1\n"


async def test_a_cancelled_call_leaves_no_process_and_no_descriptor() -> None:
    await run("1")
    before = len(os.listdir("/proc/self/fd"))
    call = asyncio.create_task(run("while True:\n    pass", limits=CellLimits(seconds=60)))
    async with asyncio.timeout(30):
        while not children(os.getpid()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before
