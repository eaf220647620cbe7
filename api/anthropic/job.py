"""The job of a request: its conversation, and a limit of its thoughts where the model thinks."""

from __future__ import annotations

from collections.abc import Sequence

from api.anthropic.body import MessagesBody
from api.conversation.sent_fields import Turn
from api.http.state import ServiceState
from engine.protocol.types import EngineError
from reasoner.admission.resolve import resolve_job
from reasoner.jobs.request import JobRequest


async def build_job(body: MessagesBody, turns: Sequence[Turn], state: ServiceState) -> JobRequest:
    """Return the job of a request with these turns. A model that is known not to think has no limit of thoughts.

    Raises as ``ConversationRequest.to_job``, and ``JobRefused`` for a job that cannot run.
    """
    served = await state.catalog.list_known()
    job = body.to_job([turn.message for turn in turns], state.settings, served)
    if body.limits_thoughts and not await _can_think(job, state):
        job = job.model_copy(update={"budget": body.lift_thought_limit(job.budget)})
    return job


async def _can_think(request: JobRequest, state: ServiceState) -> bool:
    """Return False if a model of the job is known not to think, so that a limit of its thoughts has no meaning."""
    try:
        return await state.catalog.has_known_thoughts(await resolve_job(request, state.settings, state.catalog))
    except EngineError:  # unknown: the job's worker will see
        return True
