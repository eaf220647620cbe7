"""The Celery application and its only messages, wake-ups.

A wake-up tells a worker to look at one job. The state of the job is in the store alone, so a message may be lost,
duplicated or late, and no result is read from Celery.
"""

from __future__ import annotations

from typing import Final

from celery import Celery

from workers.broker.embedded import broker_url
from workers.broker.transport import WakeupAMQP
from workers.config.settings import QUEUES, Settings

RUN_TASK: Final = "reasoner.run"
WEBHOOK_TASK: Final = "reasoner.webhook"
WEBHOOKS: Final = "webhooks"


def make_celery(settings: Settings) -> Celery:
    """Return the Celery application of senders and workers."""
    app = Celery("reasoner", broker=celery_url(broker_url(settings)), amqp=WakeupAMQP)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        result_accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,  # with the prefetch of 1: a worker fetches no more messages than it has slots
        task_default_queue=QUEUES[0],
        task_create_missing_queues=True,
        worker_prefetch_multiplier=1,
        worker_concurrency=settings.concurrency,
        worker_pool="threads",
        worker_soft_shutdown_timeout=10.0,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_connection_timeout=2.0,
        broker_transport_options={
            "queue_order_strategy": "priority",
            # Otherwise a publish or a poll on a dead connection would block for ever.
            "socket_timeout": 5.0,
            "socket_connect_timeout": 2.0,
        },
    )
    return app


def send_wakeup(app: Celery, job_id: str, queue: str) -> None:
    """Publish one message, without retries: the reaper sends it again if it is lost."""
    task = WEBHOOK_TASK if queue == WEBHOOKS else RUN_TASK
    app.send_task(task, args=[job_id], queue=queue, ignore_result=True, retry=False)


def celery_url(redis_url: str) -> str:
    """Return the broker's URL in the syntax of Celery's transport, which differs for Unix sockets."""
    scheme, separator, path = redis_url.partition("://")
    if scheme != "unix":
        return redis_url
    path, _, query = path.partition("?")
    database = dict(pair.split("=", 1) for pair in query.split("&") if "=" in pair).get("db", "0")
    return f"redis+socket{separator}{path}?virtual_host={database}"
