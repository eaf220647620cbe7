"""Jobs whose journals have tokens and log-probabilities, from searches on an engine without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.protocol.types import Branch, GenerateRequest, TokenLogprob
from reasoner.jobs.events import Event
from reasoner.jobs.journal import Entry, MemoryJournal
from reasoner.run import run_job
from reasoner.training_data.recorded_job import RecordedJob
from tests.scripted import ScriptedEngine
from tests.specs import build_spec


class TellingEngine(ScriptedEngine):
    """Engine whose log-probabilities tell the token and its position."""

    def _logprobs(self, request: GenerateRequest, branch: Branch, ids: list[int]) -> tuple[TokenLogprob, ...] | None:
        told = super()._logprobs(request, branch, ids)
        if told is None or request.sampling.ignore_eos:
            return told
        start = len(request.prompt) + len(branch.generated)
        return tuple(
            TokenLogprob(token.token_id, tell(token.token_id, start + at), token.top) for at, token in enumerate(told)
        )


def tell(token: int, position: int) -> float:
    """Return the log-probability of a token at a position in its sequence."""
    return -(token * 1000 + position) / 1000


def make_events(entries: Sequence[Entry]) -> list[Event]:
    return [
        Event(seq=seq, type=entry.type, at=0.0, key=entry.key, data=entry.data)
        for seq, entry in enumerate(entries, start=1)
    ]


async def search(engine: ScriptedEngine, **fields: Any) -> RecordedJob:
    """Run a job and return it with what its journal recorded."""
    spec = build_spec({"problem": "1 + 1?", "record_logprobs": True, "budget": {"tokens": 3000}, **fields})
    journal = MemoryJournal()
    outcome = await run_job(spec, engine, journal)
    return record(spec.model_dump(), outcome.status, outcome.result.model_dump(), journal.entries)


def record(spec: dict[str, Any], status: str, result: dict[str, Any] | None, entries: Sequence[Entry]) -> RecordedJob:
    document = {"id": "job_1", "status": status, "finished_at": 1.5, "spec": spec, "result": result}
    return RecordedJob.from_events(document, make_events(entries))
