"""Delivery of the end of a job to its webhook, signed according to Standard Webhooks.

One script records the end of a job and its pending delivery, so neither exists without the other. The reaper sends the
wake-ups, as for jobs; a delivery is claimed, attempted once, and then settled or postponed. If a worker dies during an
attempt, the webhook may arrive twice, under the same ``webhook-id``.

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
"""Seconds between attempts; after the last one the delivery has failed."""
_LEASE_SECONDS = 3 * TIMEOUT_SECONDS
_GONE = 410
_JITTER = 0.2
"""The maximum relative change of a pause, so that deliveries that failed together are not retried together."""

log = structlog.get_logger("reasoner.webhooks")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A claimed attempt at one delivery."""

    job_id: str
    token: int
    number: int
    """From 1."""
    seq: int
    """The number of the terminal event."""
    address: str
    owner: str


async def deliver(job_id: str, *, store: JobStore, settings: Settings) -> None:
    """Attempt the delivery of a job, if one can be claimed."""
    lease, max_attempts = round(_LEASE_SECONDS * 1000), len(PAUSES) + 1
    outcome, *claim = await store.script("webhook_claim", job_id, lease, max_attempts)
    if outcome != "claimed":
        return
    token, number, seq, address, owner = claim
    attempt = Attempt(job_id, token, number=number, seq=int(seq), address=address, owner=owner)
    logger = log.bind(job=job_id, attempt=number)
    try:
        job = await store.get(job_id)
    except NoSuchJob:  # deleted since
        return
    try:
        body, headers = build_message(attempt, job, settings)
        await post(address, body, headers, allowed=settings.webhook_allow)
    except (ForbiddenAddress, SendFailed) as error:
        final = isinstance(error, ForbiddenAddress) or error.status == _GONE or number == max_attempts
        pause = 0.0 if final else PAUSES[number - 1] * random.uniform(1 - _JITTER, 1 + _JITTER)
        await _settle(store, attempt, state="failed" if final else "pending", error=str(error), pause=pause)
        logger.warning("webhook failed", error=str(error), final=final)
    else:
        await _settle(store, attempt, state="delivered", error="", pause=0.0)
        logger.info("webhook delivered")


def build_message(attempt: Attempt, job: JobDocument, settings: Settings) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of a delivery. Raises ``ForbiddenAddress`` if no secret is configured."""
    secret = settings.webhook_secrets.get(attempt.owner) or settings.webhook_secret
    if secret is None:
        raise ForbiddenAddress("this service cannot sign webhooks: set REASONER_WEBHOOK_SECRET")
    fields = ("id", "status", "created_at", "started_at", "finished_at", "batch", "usage", "result", "error")
    payload = {
        "type": f"job.{job['status']}",
        "timestamp": datetime.fromtimestamp(job["finished_at"], UTC).isoformat().replace("+00:00", "Z"),
        "data": {name: job[name] for name in fields} | {"metadata": job["spec"]["metadata"]},
    }
    body = json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode()
    message_id, now = f"msg_{attempt.job_id.removeprefix('job_')}_{attempt.seq}", str(int(time.time()))
    return body, {
        "Content-Type": "application/json",
        "User-Agent": "Reasoner-Webhooks/1",
        "webhook-id": message_id,
        "webhook-timestamp": now,
        "webhook-signature": sign(decode_webhook_secret(secret.get_secret_value()), message_id, now, body),
    }


def sign(secret: bytes, message_id: str, timestamp: str, body: bytes) -> str:
    """Return the header's signature: HMAC-SHA256 of ``ID.TIMESTAMP.BODY``."""
    signed = b".".join((message_id.encode(), timestamp.encode(), body))
    return "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()


async def _settle(store: JobStore, attempt: Attempt, state: str, error: str, pause: float) -> None:
    await store.script("webhook_settle", attempt.job_id, attempt.token, state, error, round(pause * 1000))
