"""A verifier of your own, in Python: sample solutions until one of them passes your check.

A strategy is a function of the search and its parameters. This one needs no verifier of the service: ``check`` is the
verifier. It must be a function of the answer alone, since a replay of the journal runs it again.
"""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import reasoner
from engine.core.local_engine import LocalEngine
from reasoner.admission.resolve import resolve_program_job
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.run import run_job
from reasoner.search.search import Search
from reasoner.strategies.base import Choice, Params, Samples, Strategy
from reasoner.strategies.registry import STRATEGIES

BUNDLED = Path(reasoner.__file__).parent / "bundled"
NUMBERS, TARGET = [4, 10, 4, 8], 32


def check(answer: str) -> bool:
    """Return True for an expression of ``NUMBERS``, each used once, whose value is ``TARGET``."""
    try:
        tree = ast.parse(answer, mode="eval")
    except SyntaxError:
        return False
    allowed = (ast.Expression, ast.BinOp, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.Div)
    if not all(isinstance(node, allowed) for node in ast.walk(tree)):
        return False
    used = sorted(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    try:
        return used == sorted(NUMBERS) and eval(compile(tree, "answer", "eval")) == TARGET
    except (ArithmeticError, TypeError):
        return False


class FirstChecked(Params):
    n: Samples = 32


async def run(search: Search, params: FirstChecked) -> Choice:
    """Sample n solutions and end at the first one whose answer passes the check."""
    async with search.stream() as stream:
        stream.complete([search.root], params.n)
        async for arrived in stream:
            for node in arrived:
                if node.answer is not None and check(node.answer):
                    return Choice(node, confidence=1.0)  # leaving the block cancels the other samples
    return Choice(None)


STRATEGIES["first_checked"] = Strategy("first_checked", FirstChecked, run)


async def main() -> None:
    engine = LocalEngine({"policy": BUNDLED / "policy"})
    request = JobRequest.model_validate(
        {
            "problem": f"Make {TARGET} with + - * / from the numbers 4, 10, 4 and 8, each used exactly once.",
            "model": "policy",
            "verifier": None,
            "strategy": {"name": "first_checked"},
            "seed": 3,
        }
    )
    job = resolve_program_job(request)
    outcome = await run_job(job, engine, MemoryJournal())
    print(outcome.status, outcome.result.answer, f"after {outcome.usage.generated} tokens")
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
