"""A store with an archive, and jobs that have ended."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from api.roles.supervisor import free_port
from tests.workers.fixtures import broker, url
from workers.archive.archive import Archive
from workers.broker.archiver import Archiver
from workers.store.jobs import JobStore

__all__ = ["broker", "url"]

_PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Return the URL of a PostgreSQL server of Debian's package, which runs for the session."""
    if not _PROGRAMS or shutil.which("runuser") is None:
        pytest.skip("needs PostgreSQL: apt-get install postgresql")
    programs, port = _PROGRAMS[-1].parent, free_port()
    folder = Path(tempfile.mkdtemp(prefix="reasoner-postgres-"))  # pytest's folders are closed to the server's user
    shutil.chown(folder, "postgres")

    def run(program: str, *arguments: str) -> None:
        command = ["runuser", "-u", "postgres", "--", str(programs / program), "-D", str(folder / "data"), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)

    run("initdb", "--auth=trust", "--username=postgres", "--no-sync")
    options = f"-p {port} -k {folder} -h 127.0.0.1 -c fsync=off"
    run("pg_ctl", "-o", options, "-l", str(folder / "log"), "-w", "start")
    yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    run("pg_ctl", "-m", "immediate", "stop")
    shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def archive_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'archive.sqlite3'}"
    import psycopg

    server: str = request.getfixturevalue("postgres")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return server


@pytest.fixture
async def archive(archive_url: str) -> AsyncIterator[Archive]:
    archive = Archive(archive_url)
    yield archive
    await archive.close()


@pytest.fixture
async def store(url: str, archive: Archive) -> AsyncIterator[JobStore]:
    store = JobStore(url, retry_seconds=5.0, archive=archive)
    yield store
    await store.close()


@pytest.fixture
def archiver(store: JobStore, archive: Archive) -> Archiver:
    """Return an archiver that moves jobs as soon as they have ended."""
    return Archiver(store, archive, age=0.0, retention=1e6)
