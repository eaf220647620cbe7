"""The liveness file of a worker, for health checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery import Celery, bootsteps

TOUCH_SECONDS = 1.0


def touch_while_consuming(app: Celery, path: Path) -> None:
    """Make the worker of ``app`` touch a file each second while it is connected to its broker.

    The event loop that fetches messages does so, so that the file of a worker that hangs or has no broker ages. An
    orderly shutdown removes the file.
    """

    class Touch(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
        requires = ("celery.worker.consumer.tasks:Tasks",)

        def start(self, parent: Any) -> None:  # after each reconnection, which clears the timer
            path.touch()
            parent.timer.call_repeatedly(TOUCH_SECONDS, path.touch)

        def shutdown(self, parent: Any) -> None:  # noqa: ARG002
            path.unlink(missing_ok=True)

    app.steps["consumer"].add(Touch)
