"""A worker starts its subprocess for answer comparisons at its own start, not with the first job."""

from __future__ import annotations

import pytest
from celery.signals import worker_init, worker_shutdown

from reasoner.answers.equivalence import POOL
from tests.worker_pools import no_workers
from workers.config.settings import load_settings
from workers.execution.tasks import make_worker

__all__ = ["no_workers"]


@pytest.mark.usefixtures("no_workers")
def test_a_worker_keeps_its_comparison_subprocess_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for signal in (worker_init, worker_shutdown):
        monkeypatch.setattr(signal, "receivers", [])  # removes receivers of other tests
    make_worker(load_settings(redis_url="redis://localhost:1"))
    assert POOL.idle_workers == []
    worker_init.send(sender=None)
    (child,) = POOL.idle_workers
    worker_shutdown.send(sender=None)
    assert POOL.idle_workers == []
    assert child.process.returncode is not None
