"""A worker's child for comparisons is started with the worker, not with the first job that compares answers."""

from __future__ import annotations

import pytest
from celery.signals import worker_init, worker_shutdown

from reasoner.answers.equivalence import POOL
from tests.worker_pools import no_workers
from workers.config.settings import load_settings
from workers.execution.tasks import make_worker

__all__ = ["no_workers"]


@pytest.mark.usefixtures("no_workers")
def test_a_worker_keeps_a_child_for_comparisons_as_long_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for signal in (worker_init, worker_shutdown):
        monkeypatch.setattr(signal, "receivers", [])  # those of other tests' workers
    make_worker(load_settings(redis_url="redis://localhost:1"))
    assert POOL.idle_workers == []
    worker_init.send(sender=None)
    (child,) = POOL.idle_workers
    worker_shutdown.send(sender=None)
    assert POOL.idle_workers == []
    assert child.process.returncode is not None
