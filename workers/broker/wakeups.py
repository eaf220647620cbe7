"""Celery as it is used here: a doorbell. A message says "look at job X"; what is true stands in the store.

So a message may be lost, doubled or late, and no result is ever read from Celery.
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
    """The application that senders and workers share."""
    app = Celery("reasoner", broker=celery_url(broker_url(settings)), amqp=WakeupAMQP)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        result_accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,  # a worker takes as many messages as it has slots, and leaves the others to others
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
            # Without it a publish or a poll on a connection that died silently would wait for ever.
            "socket_timeout": 5.0,
            "socket_connect_timeout": 2.0,
        },
    )
    return app


def send_wakeup(app: Celery, job_id: str, queue: str) -> None:
    """Publishes one message, without retries: a reaper comes back to a job whose message did not get out."""
    task = WEBHOOK_TASK if queue == WEBHOOKS else RUN_TASK
    app.send_task(task, args=[job_id], queue=queue, ignore_result=True, retry=False)


def celery_url(redis_url: str) -> str:
    """The same broker in the words of Celery's transport, which spells a Unix socket in its own way."""
    scheme, separator, path = redis_url.partition("://")
    if scheme != "unix":
        return redis_url
    path, _, query = path.partition("?")
    database = dict(pair.split("=", 1) for pair in query.split("&") if "=" in pair).get("db", "0")
    return f"redis+socket{separator}{path}?virtual_host={database}"
