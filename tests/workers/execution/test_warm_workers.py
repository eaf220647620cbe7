"""A worker starts its subprocess for answer comparisons at its own start, not with the first job."""

from __future__ import annotations

import pytest

from reasoner.answers.equivalence import POOL
from tests.worker_pools import no_workers
from workers.config.settings import load_settings
from workers.execution.tasks import make_worker

__all__ = ["no_workers"]


@pytest.mark.usefixtures("no_workers")
def test_a_worker_keeps_its_comparison_subprocess_while_it_runs() -> None:
    app = make_worker(load_settings(redis_url="redis://localhost:1"))
    assert POOL.idle_workers == []
    pool = app.conf.worker_pool(1, app=app)
    pool.start()
    (child,) = POOL.idle_workers
    pool.stop()
    assert POOL.idle_workers == []
    assert child.process.returncode is not None
