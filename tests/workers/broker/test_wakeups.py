"""The messages that the script of due jobs puts into the queues are those that Celery's own sender would put there."""

from __future__ import annotations

import base64
import json
from typing import Any

import redis

from tests.workers.store.helpers import submit
from workers.broker.wakeups import RUN_TASK, make_celery, make_templates
from workers.config.settings import load_settings
from workers.store.jobs import JobStore


def read_message(text: bytes) -> dict[str, Any]:
    """Return a stored message with its body decoded as kombu does."""
    message: dict[str, Any] = json.loads(text)
    body = message["body"]
    if message["properties"].pop("body_encoding", None) == "base64":
        body = base64.b64decode(body)
    return message | {"body": json.loads(body)}


def drop_unique(message: dict[str, Any]) -> dict[str, Any]:
    """Remove what differs from message to message and from sender to sender."""
    unique = {"correlation_id", "delivery_tag", "delivery_info", "delivery_mode", "reply_to"}
    return {
        **message,
        "headers": {
            name: value
            for name, value in message["headers"].items()
            if name not in ("id", "root_id", "origin", "periodic_task_name")
        },
        "properties": {name: value for name, value in message["properties"].items() if name not in unique},
    }


async def test_a_queued_wake_up_equals_the_message_of_celerys_own_sender(store: JobStore, url: str) -> None:
    app = make_celery(load_settings(redis_url=url))
    job_id = await submit(store)
    assert await store.reap(3, make_templates(app)) == [(job_id, "interactive")]
    with redis.Redis.from_url(url) as client:
        (ours,) = client.lrange("interactive", 0, -1)
        client.delete("interactive")
        app.send_task(RUN_TASK, args=[job_id], queue="interactive", ignore_result=True, retry=False)
        (theirs,) = client.lrange("interactive", 0, -1)
    made, sent = read_message(ours), read_message(theirs)
    assert drop_unique(made) == drop_unique(sent)
    assert made["body"][0] == [job_id]
    assert made["headers"]["id"] == made["properties"]["correlation_id"] == job_id


async def test_each_message_of_a_job_has_a_tag_of_its_own_and_queues_keep_the_order(store: JobStore, url: str) -> None:
    templates = make_templates(make_celery(load_settings(redis_url=url)))
    ids = [await submit(store) for _ in range(3)]
    await store.reap(3, templates)
    with redis.Redis.from_url(url) as client:
        first = [read_message(text) for text in reversed(client.lrange("interactive", 0, -1))]
        client.delete("interactive")  # the messages are lost
        client.zadd("reasoner:due", dict.fromkeys(ids, 1))
        await store.reap(3, templates)
        again = [read_message(text) for text in reversed(client.lrange("interactive", 0, -1))]
    assert [message["body"][0] for message in first] == [[job_id] for job_id in ids]
    assert sorted(message["headers"]["id"] for message in again) == sorted(ids)
    assert len({message["properties"]["delivery_tag"] for message in first + again}) == 6
