"""Check, before a token is spent, that this system can lock untrusted code up."""

from __future__ import annotations

from engine.protocol.types import InvalidRequest
from reasoner.sandbox.runner import Limits, SandboxRefused, run_tests


async def check_lockdown(subject: str, field: str) -> None:
    """Raise ``InvalidRequest`` for a job's ``field`` if this system has no sandbox for its ``subject``."""
    try:
        await run_tests("", ["assert True"], Limits())
    except SandboxRefused as error:
        raise InvalidRequest(
            f"this worker has no sandbox for {subject}: {error}. Where every client is trusted its operator can set "
            "REASONER_UNLOCKED_TESTS=true, which runs them with limits of time and memory alone",
            field,
        ) from error
