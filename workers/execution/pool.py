"""Celery's pool over the event loop of jobs: no threads of its own, and no results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
from celery.concurrency.base import BasePool
from kombu.exceptions import KombuError
from kombu.serialization import loads

from workers.execution.job_loop import JobLoop

log = structlog.get_logger("reasoner.worker")

_ACCEPTED = frozenset({"json", "application/json"})


def make_pool(loop: JobLoop) -> type[BasePool]:
    """Return the class of a pool that runs each message on a loop.

    Its number of slots is the number of messages that Celery fetches before it has acknowledged one of them.
    """

    class JobPool(BasePool):  # type: ignore[misc]  # Celery has no types
        body_can_be_buffer = True
        signal_safe = False

        def on_start(self) -> None:
            # Acknowledging blocks on the broker, which the loop must not.
            self._acknowledging = ThreadPoolExecutor(1, "acknowledging")
            loop.start()

        def on_stop(self) -> None:
            loop.stop()
            self._acknowledging.shutdown()

        def on_apply(
            self,
            target: object,  # noqa: ARG002
            args: tuple[Any, ...],
            kwargs: object = None,  # noqa: ARG002
            callback: Callable[..., object] | None = None,
            accept_callback: Callable[..., object] | None = None,
            **_: object,
        ) -> None:
            assert callback is not None
            assert accept_callback is not None
            report, executor, started = callback, self._acknowledging, time.monotonic()

            def acknowledge() -> None:
                executor.submit(report, (0, None, time.monotonic() - started))

            accept_callback(os.getpid(), started)
            name, _id, _request, body, content_type, encoding = args
            try:
                (job_id,), *_rest = loads(body, content_type, encoding, accept=_ACCEPTED)
            except (KombuError, TypeError, ValueError) as error:
                log.error("message dropped: it is no wake-up", task=name, error=type(error).__name__)
                acknowledge()
            else:
                loop.submit(name, job_id, acknowledge)

    return JobPool
