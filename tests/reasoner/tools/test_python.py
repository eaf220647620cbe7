"""Python in branches on the real sandbox and engine: state, hostile code, and text that is no control token."""

from __future__ import annotations

import asyncio

import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.thoughts import DELIMITERS
from engine.protocol.types import TokenizeRequest
from reasoner.budget.ledger import Ledger
from reasoner.budget.spec import Budget
from reasoner.jobs.sampling_spec import Sampling
from reasoner.sandbox.cells import CellLimits, Ending
from reasoner.search.branch_text import BranchText
from reasoner.search.calls.runner import CallRunner
from reasoner.search.policies.policy import Policy
from reasoner.tools.python import CallResult, PythonRunner
from reasoner.tree import Node
from tests.reasoner.search.test_thoughts_on_engine import POLICY

LIMITS = CellLimits(seconds=2.0, memory_bytes=256 << 20, output_chars=1000)


def write(*cells: str) -> str:
    """Return a solution that calls each of these cells."""
    return "\n```output\n…\n```\n".join(f"```python\n{cell}\n```" for cell in cells)


async def run(*cells: str) -> CallResult:
    result = await PythonRunner(LIMITS, Ledger(Budget()).seconds_until_cut).run(cells)
    assert result is not None
    return result


async def test_a_branch_has_the_state_of_its_own_blocks_alone() -> None:
    left, right = await asyncio.gather(run("x = 1", "x += 1", "print(x)"), run("x = 5", "print(x)"))
    assert (left.output, right.output) == ("2", "5")
    assert "NameError" in (await run("print(x)")).output


@pytest.mark.parametrize(
    ("code", "ended", "text"),
    [
        ("while True: pass", {"timeout"}, "ended: it ran longer than 2 seconds"),
        ("print('x' * (1 << 30))", {"output", "memory"}, "ended: it "),
        ("while True: print('x' * 1000)", {"output"}, "ended: it printed far more than 1000 characters"),
        ("x = bytearray(1 << 30)", {"memory"}, "ended: it needed more than 256 MB of memory"),
        ("import os\nwhile True: os.fork()", {"error", "died"}, ""),
        ("import os\nos.kill(os.getpid(), 9)", {"died", "error"}, ""),
    ],
)
async def test_hostile_code_ends_its_own_call_with_a_reason(code: str, ended: set[Ending], text: str) -> None:
    hostile, other = await asyncio.gather(run("print('so far')", code), run("print(1 + 1)"))
    assert hostile.ended in ended
    assert text in hostile.output
    assert hostile.is_fatal == (hostile.ended != "error")
    assert (other.output, other.ended) == ("2", "ok")


async def test_printed_delimiters_are_spelled_instead_of_read_as_control_tokens() -> None:
    engine = LocalEngine({"thinker": POLICY}, EngineOptions(kv_tokens=1024))
    try:
        [model] = await engine.models()
        opening, closing = DELIMITERS[0]
        [special] = await engine.tokenize(TokenizeRequest(model.id, closing, special=False))
        calls = CallRunner(PythonRunner(LIMITS, lambda: None), engine, (Policy(model, Sampling()),), max_calls=1)
        text = write(f"print('5 {opening} 6 {closing} [1, 2] <b>')")
        branch = BranchText(Node((), None, (1,)), 400, text=text)
        output = await calls.run(branch)
        assert output is not None
        assert output.text == f"\n```output\n5 {opening} 6 {closing} [1, 2] <b>\n```\n"
        assert special not in output.token_ids
        assert special in await engine.tokenize(TokenizeRequest(model.id, output.text, special=False))
    finally:
        await engine.close()
