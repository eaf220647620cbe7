"""A drill: the append-only file of a running server is copied, all is lost, a new server continues from the copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from api.roles.supervisor import free_port
from tests.chaos.processes import until
from tests.deploy.fleets import Fleet, copy_journal, count_begun, read_results, run_server, submit

pytestmark = pytest.mark.timeout(600)


def test_jobs_of_a_copied_journal_continue_on_a_new_server(tmp_path: Path) -> None:
    lost, restored = tmp_path / "lost", tmp_path / "restored"
    port = free_port()
    with run_server(lost, port) as server, Fleet(tmp_path, port) as fleet:
        _, client = fleet.start_api()
        fleet.start_role("worker")
        ended = submit(client, range(3))
        before = read_results(client, ended)
        jobs = submit(client, range(3, 16))
        until(lambda: count_begun(client, jobs) > 3, "some jobs have begun")
        copy_journal(lost, restored)
        server.kill()
        server.wait(30)
    shutil.rmtree(lost)

    port = free_port()
    with run_server(restored, port), Fleet(tmp_path, port) as fleet:
        _, client = fleet.start_api()
        fleet.start_role("worker")
        assert read_results(client, ended) == before
        results = read_results(client, jobs)
        assert results == read_results(client, submit(client, range(3, 16)))
