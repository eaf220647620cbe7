"""A file by which a health check sees that a worker takes jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery import Celery, bootsteps

TOUCH_SECONDS = 1.0


def touch_while_consuming(app: Celery, path: Path) -> None:
    """Have the worker of ``app`` touch a file every second for as long as it is connected to its broker.

    The loop that fetches messages does it: a worker that hangs, or whose broker is away, lets the file grow old. The
    file is removed at an orderly end.
    """

    class Touch(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
        requires = ("celery.worker.consumer.tasks:Tasks",)

        def start(self, parent: Any) -> None:  # after each reconnection, which clears the timer
            path.touch()
            parent.timer.call_repeatedly(TOUCH_SECONDS, path.touch)

        def shutdown(self, parent: Any) -> None:  # noqa: ARG002
            path.unlink(missing_ok=True)

    app.steps["consumer"].add(Touch)
