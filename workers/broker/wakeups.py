"""The Celery application and its only messages, wake-ups.

A wake-up tells a worker to look at one job. The state of the job is in the store alone, so a message may be lost,
duplicated or late, and no result is read from Celery.
"""

from __future__ import annotations

import json
from typing import Final

from celery import Celery

from workers.broker.embedded import broker_url
from workers.broker.transport import ADDRESS, CELERY_URL, WakeupAMQP
from workers.config.broker_address import parse_broker_url
from workers.config.settings import QUEUES, Settings
from workers.store.reaping import JOB_PLACEHOLDER, TAG_PLACEHOLDER, WakeupTemplates

RUN_TASK: Final = "reasoner.run"
WEBHOOK_TASK: Final = "reasoner.webhook"


def make_celery(settings: Settings) -> Celery:
    """Return the Celery application of senders and workers."""
    address = parse_broker_url(broker_url(settings))
    app = Celery("reasoner", broker=CELERY_URL, amqp=WakeupAMQP)
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
        worker_soft_shutdown_timeout=10.0,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_channel_error_retry=True,  # an error that the broker answers must not end a worker with its searches
        broker_connection_max_retries=None,
        broker_connection_timeout=2.0,
        broker_transport_options={
            ADDRESS: address,
            "reasoner_identity": hash(address),  # pools are found by the text of these options, which has no password
            "queue_order_strategy": "priority",
            # Otherwise a publish or a poll on a dead connection would block for ever.
            "socket_timeout": 5.0,
            "socket_connect_timeout": 2.0,
        },
    )
    return app


def make_templates(app: Celery) -> WakeupTemplates:
    """Return the messages as Celery's transport stores them, for the script that finds the jobs that need one."""
    return WakeupTemplates(run=_make_template(app, RUN_TASK), webhook=_make_template(app, WEBHOOK_TASK))


def _make_template(app: Celery, task: str) -> str:
    message = app.amqp.as_task_v2(JOB_PLACEHOLDER, task, args=[JOB_PLACEHOLDER], ignore_result=True)
    return json.dumps(
        {
            "body": json.dumps(message.body),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": message.headers,
            "properties": {
                **message.properties,
                "delivery_info": {"exchange": "", "routing_key": ""},
                "delivery_tag": TAG_PLACEHOLDER,
                "priority": 0,
            },
        }
    )
