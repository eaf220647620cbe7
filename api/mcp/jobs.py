"""The jobs that the tools work on: those of this process's store, or of a service behind ``AsyncClient``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from api.http.principal import Principal, check_scopes
from api.http.problems import find_problem
from api.http.search_tree import build_tree
from api.http.state import ServiceState
from api.http.submission import submit_job
from api.mcp.arguments import parse_model
from api.routes.jobs import check_job_id
from reasoner.client import ServiceError
from reasoner.jobs.events import Event
from reasoner.jobs.job import Job
from reasoner.jobs.request import JobRequest
from reasoner.jobs.verifier_specs import accept_unknown_verifiers
from reasoner.jobs.view import fold_events
from workers.store.keys import Scope
from workers.store.serialization import JobDocument


class Jobs(Protocol):
    """The jobs of one caller, as ``AsyncClient`` offers them. Every refusal is a ``ServiceError``."""

    async def submit(self, spec: dict[str, Any]) -> Job:
        """Submit a job: the fields of ``JobRequest``."""

    async def get(self, job_id: str) -> Job:
        """Return a job as it is now."""

    async def cancel(self, job_id: str) -> Job:
        """Cancel a job."""

    async def tree(self, job_id: str) -> dict[str, Any]:
        """Return the search tree of a job so far."""

    def events(self, job_id: str, after: int = 0) -> AsyncIterator[Event]:
        """Yield the job's events behind number ``after`` up to its end."""


@dataclass(frozen=True, slots=True)
class StoredJobs:
    """The jobs that a request to this process may submit and see, by the rules of ``/v1/jobs``."""

    state: ServiceState
    principal: Principal

    async def submit(self, spec: dict[str, Any]) -> Job:
        with self._refusing("jobs:write"):
            document, _ = await submit_job(parse_model(JobRequest, spec), self.principal, self.state)
            return _read_job(document)

    async def get(self, job_id: str) -> Job:
        with self._refusing("jobs:read"):
            return _read_job(await self.state.store.get(await self._check(job_id)))

    async def cancel(self, job_id: str) -> Job:
        with self._refusing("jobs:write"):
            return _read_job(await self.state.store.cancel(await self._check(job_id)))

    async def tree(self, job_id: str) -> dict[str, Any]:
        with self._refusing("jobs:read"):
            events = await self.state.store.load_events(await self._check(job_id))
            return build_tree(job_id, fold_events(events)).model_dump()

    async def events(self, job_id: str, after: int = 0) -> AsyncIterator[Event]:
        with self._refusing("jobs:read"):
            async for event in self.state.store.follow(await self._check(job_id), after):
                yield event

    async def _check(self, job_id: str) -> str:
        return await check_job_id(job_id, self.state, self.principal)

    @contextlib.contextmanager
    def _refusing(self, scope: Scope) -> Iterator[None]:
        """Raise what a client of the HTTP API would get: ``ServiceError`` with the problem's words."""
        try:
            check_scopes(self.principal, [scope])
            yield
        except Exception as error:
            problem = find_problem(error)
            if problem is None:
                raise
            raise ServiceError(problem.detail, problem.status_code) from None


def _read_job(document: JobDocument) -> Job:
    with accept_unknown_verifiers():
        return Job.model_validate(document)
