"""Webhooks: the end of a job, told to an address that its client named, signed as Standard Webhooks says.

The end of a job and the duty to tell it are one script, so neither comes without the other. The reaper sends the
wake-ups, as it does for jobs; a delivery is claimed, tried once, and then settled or put off. It may arrive twice, if a
worker dies at the wrong moment, under the same ``webhook-id``.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog

from workers.config.settings import Settings
from workers.config.types import decode_webhook_secret
from workers.store.jobs import JobStore, NoSuchJob
from workers.store.serialization import JobDocument
from workers.webhooks.http import TIMEOUT_SECONDS, ForbiddenAddress, SendFailed, post

PAUSES: Final = (5.0, 30.0, 300.0, 1800.0, 7200.0, 28800.0)
"""Seconds between attempts; after the last one the delivery is given up."""
_LEASE_SECONDS = 3 * TIMEOUT_SECONDS
_GONE = 410
_SPREAD = 0.2
"""Part of a pause by which it is longer or shorter, so that what failed together does not come back together."""

log = structlog.get_logger("reasoner.webhooks")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A worker's right to try one delivery."""

    job_id: str
    token: int
    number: int
    """From 1."""
    seq: int
    """Of the terminal event that is told."""
    address: str
    owner: str


async def deliver(job_id: str, *, store: JobStore, settings: Settings) -> None:
    """Does what a wake-up asks for, if there is anything to do."""
    lease, most = round(_LEASE_SECONDS * 1000), len(PAUSES) + 1
    outcome, *claimed = await store.script("webhook_claim", job_id, lease, most)
    if outcome != "claimed":
        return
    token, number, seq, address, owner = claimed
    attempt = Attempt(job_id, token, number, int(seq), address, owner)
    logger = log.bind(job=job_id, attempt=number)
    try:
        job = await store.get(job_id)
    except NoSuchJob:  # deleted since
        return
    try:
        body, headers = message(attempt, job, settings)
        await post(address, body, headers, allowed=settings.webhook_allow)
    except (ForbiddenAddress, SendFailed) as error:
        final = isinstance(error, ForbiddenAddress) or error.status == _GONE or number == most
        pause = 0.0 if final else PAUSES[number - 1] * random.uniform(1 - _SPREAD, 1 + _SPREAD)
        await _settle(store, attempt, "failed" if final else "pending", str(error), pause)
        logger.warning("webhook failed", error=str(error), final=final)
    else:
        await _settle(store, attempt, "delivered", "", 0.0)
        logger.info("webhook delivered")


def message(attempt: Attempt, job: JobDocument, settings: Settings) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a delivery. Raises ``ForbiddenAddress`` where there is nothing to sign it with."""
    secret = settings.webhook_secrets.get(attempt.owner) or settings.webhook_secret
    if secret is None:
        raise ForbiddenAddress("this service has no secret to sign webhooks with")
    shown = ("id", "status", "created_at", "started_at", "finished_at", "batch", "usage", "result", "error")
    told = {
        "type": f"job.{job['status']}",
        "timestamp": datetime.fromtimestamp(job["finished_at"], UTC).isoformat().replace("+00:00", "Z"),
        "data": {name: job[name] for name in shown} | {"metadata": job["spec"]["metadata"]},
    }
    body = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    message_id, now = f"msg_{attempt.job_id.removeprefix('job_')}_{attempt.seq}", str(int(time.time()))
    return body, {
        "Content-Type": "application/json",
        "User-Agent": "Reasoner-Webhooks/1",
        "webhook-id": message_id,
        "webhook-timestamp": now,
        "webhook-signature": signature(decode_webhook_secret(secret.get_secret_value()), message_id, now, body),
    }


def signature(secret: bytes, message_id: str, timestamp: str, body: bytes) -> str:
    """HMAC-SHA256 of ``ID.TIMESTAMP.BODY``, as the header has it."""
    signed = b".".join((message_id.encode(), timestamp.encode(), body))
    return "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()


async def _settle(store: JobStore, attempt: Attempt, state: str, error: str, pause: float) -> None:
    await store.script("webhook_settle", attempt.job_id, attempt.token, state, error, round(pause * 1000))
