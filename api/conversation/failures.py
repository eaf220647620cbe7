"""Problems of jobs without a result, and of streams that end before their job does."""

from __future__ import annotations

from api.conversation.narration import JobEnd
from api.http.problems import SHUTTING_DOWN, Problem, broker_problem
from workers.store.broker_errors import BROKER_DOWN
from workers.store.event_log import ShuttingDown

DELETED = Problem(409, "deleted", "the job was deleted while it ran")
INTERRUPTIONS = (ShuttingDown, *BROKER_DOWN)
"""Errors for which a stream ends before its job does."""
_JOB_STATUS = {
    **dict.fromkeys(("invalid_request", "context_length_exceeded", "content_filter"), 422),
    "engine_error": 502,
    **dict.fromkeys(("max_attempts", "engine_unavailable", "expired"), 503),
}
"""HTTP statuses by the error code of a failed job; any other code is 500."""


def interruption_problem(error: Exception) -> Problem:
    """Return the problem of one of ``INTERRUPTIONS``."""
    return SHUTTING_DOWN if isinstance(error, ShuttingDown) else broker_problem(error)


def name_too_long(message: str) -> str:
    """Return the message of a prompt that is too long, with the words by which LiteLLM and others find it."""
    return f"the prompt is too long: {message}"


def failure_problem(end: JobEnd | None) -> Problem:
    """Return the problem of a job without a result. Clients must not repeat a paid search on their own."""
    headers = {"x-should-retry": "false"}
    if end is None:
        return Problem(409, "deleted", "the job was deleted while it ran", headers=headers)
    if end.error is None:
        return Problem(409, "cancelled", "the job was cancelled while it ran", headers=headers)
    code, message = end.error.code, end.error.message
    errors = []
    if code == "context_length_exceeded":
        message = name_too_long(message)
        errors = [("messages", message)]
    return Problem(_JOB_STATUS.get(code, 500), code.replace("_", "-"), message, errors=errors, headers=headers)
