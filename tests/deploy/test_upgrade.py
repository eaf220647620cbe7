"""Jobs of an older version under this one: in turn, and side by side as during a rolling deploy."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.roles.supervisor import free_port
from tests.chaos.processes import until
from tests.deploy.fleets import Fleet, check_out, count_begun, end, read_results, run_server, submit

OLD = "95367c78"
"""The last commit of 0.1, before jobs waited in a queue for each owner and ended ones moved to an archive."""

pytestmark = pytest.mark.timeout(600)


def test_jobs_that_an_older_version_began_end_in_this_one_as_if_it_had_run_them_alone(tmp_path: Path) -> None:
    old, port = check_out(OLD, tmp_path / "old"), free_port()
    with run_server(tmp_path / "data", port), Fleet(tmp_path, port) as fleet:
        api, client = fleet.start_api(old)
        worker = fleet.start_role("worker", old)
        jobs = submit(client, range(16))
        until(lambda: count_begun(client, jobs) > 3, "some jobs have begun")
        end(worker)
        end(api)
        _, client = fleet.start_api()
        fleet.start_role("worker")
        results = read_results(client, jobs)
        assert results == read_results(client, submit(client, range(16)))


@pytest.mark.parametrize("first", ["worker", "api"])
def test_versions_side_by_side_lose_no_job_whatever_is_replaced_first(first: str, tmp_path: Path) -> None:
    old, port = check_out(OLD, tmp_path / "old"), free_port()
    with run_server(tmp_path / "data", port), Fleet(tmp_path, port) as fleet:
        old_api, client = fleet.start_api(old)
        old_worker = fleet.start_role("worker", old)
        jobs = submit(client, range(10))
        until(lambda: count_begun(client, jobs) > 3, "some jobs have begun")
        if first == "worker":
            fleet.start_role("worker")
            jobs |= submit(client, range(10, 16))
            end(old_worker)
            _, new = fleet.start_api()
            end(old_api)
        else:
            _, new = fleet.start_api()
            jobs |= submit(new, range(10, 16))
            end(old_api)
            fleet.start_role("worker")
            end(old_worker)
        jobs |= submit(new, range(16, 20))
        results = read_results(new, jobs)
        assert results == read_results(new, submit(new, range(20)))
