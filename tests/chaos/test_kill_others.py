"""Accepted jobs end even if the API or the broker is killed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.conftest import Service, same
from workers.broker.embedded import EmbeddedBroker

pytestmark = pytest.mark.timeout(240)


def test_an_accepted_job_survives_the_death_of_its_api(service: Service, undisturbed: dict[str, Any]) -> None:
    api = service.start_api()
    job_id = service.submit()
    api.kill()
    api.wait()
    service.redis.delete("interactive")  # as if it had been killed before sending the message
    service.start_workers(1)
    service.start_api()
    assert same(service.ended(job_id)["result"], undisturbed)


@pytest.mark.long  # an outage is waited for in every run
def test_a_search_survives_the_death_of_its_broker(service: Service, undisturbed: dict[str, Any]) -> None:
    service.start_workers(2)
    service.start_api()
    job_id = service.submit()
    service.search_is_running(job_id)
    assert service.broker.process is not None
    service.broker.process.kill()
    service.broker.process.wait()
    assert service.client.get("/v1/jobs").status_code == 503
    with EmbeddedBroker(service.broker.data_dir):
        assert same(service.ended(job_id)["result"], undisturbed)
        assert same(service.ended(service.submit())["result"], undisturbed)
