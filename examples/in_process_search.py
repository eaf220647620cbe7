"""Search inside this process: an engine, a model and a verifier, without a service, a broker or a worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import reasoner
from engine.core.local_engine import LocalEngine
from reasoner.admission.resolve import resolve_program_job
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.run import run_job

BUNDLED = Path(reasoner.__file__).parent / "bundled"


async def main() -> None:
    engine = LocalEngine({"policy": BUNDLED / "policy", "prm": BUNDLED / "prm"})
    request = JobRequest.model_validate(
        {
            "problem": "Make 32 with + - * / from the numbers 4, 10, 4 and 8, each used exactly once.",
            "model": "policy",
            "verifier": {"kind": "prm", "model": "prm"},
            "strategy": {"name": "beam", "n": 16},
            "budget": {"tokens": 4000},
            "seed": 1,
        }
    )
    job = resolve_program_job(request)
    journal = MemoryJournal()
    outcome = await run_job(job, engine, journal)
    print(outcome.status, outcome.result.answer, f"for {outcome.usage.total} tokens")

    # A search that runs again on its journal makes the same decisions and asks the engine for nothing.
    again = await run_job(job, engine, MemoryJournal(journal.entries))
    assert again.result == outcome.result
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
