"""The filters of ``GET /v1/jobs``."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import Query, Request

from api.http.principal import Reader
from api.http.problems import Problem
from reasoner.jobs.job import Status
from reasoner.training_data.selection import Time
from workers.archive.filters import JobFilter, split_words

MAX_PAIRS: Final = 16
METADATA_PARAMETER: Final[dict[str, Any]] = {
    "name": "metadata",
    "in": "query",
    "style": "deepObject",
    "explode": True,
    "description": "metadata[KEY]=VALUE: only jobs whose metadata has this key with this value.",
    "schema": {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": MAX_PAIRS},
}
"""The part of the OpenAPI document about the parameters that FastAPI cannot declare."""
_Word = Annotated[str | None, Query(min_length=1, max_length=1000)]


def read_filter(
    request: Request,
    status: Annotated[
        Literal[Status, "dead"] | None,
        Query(description="'dead': failed jobs that lost their worker too often without any progress."),
    ] = None,
    strategy: Annotated[_Word, Query(description="Only jobs of this strategy.")] = None,
    model: Annotated[_Word, Query(description="Only jobs of this model.")] = None,
    name: Annotated[_Word, Query(description="Only jobs that gave this name as their model.")] = None,
    created_after: Annotated[
        Time | None, Query(description="Only jobs that were submitted then (seconds since the epoch) or later.")
    ] = None,
    created_before: Annotated[Time | None, Query(description="Only jobs that were submitted before then.")] = None,
    q: Annotated[
        str | None, Query(min_length=1, max_length=1000, description="Only jobs whose problem has all of these words.")
    ] = None,
) -> JobFilter:
    """Return the filter of a request. Raises ``Problem`` for one that can choose nothing."""
    words = split_words(q or "")
    if q is not None and not words:
        raise _build_problem("q", f"{q!r} has no word: give at least one letter or digit")
    if created_after is not None and created_before is not None and created_after >= created_before:
        raise _build_problem("created_before", "it must be later than 'created_after'")
    return JobFilter(
        status=status,
        strategy=strategy,
        model=model,
        name=name,
        metadata=_read_metadata(request),
        created_after=created_after,
        created_before=created_before,
        words=words,
    )


def read_owner(
    principal: Reader,
    owner: Annotated[
        str | None, Query(min_length=1, max_length=200, description="Only jobs of this owner, for keys that see all.")
    ] = None,
) -> str | None:
    """Return the owner whose jobs are listed; ``None`` for all. Raises ``Problem`` for one that the key may not see."""
    visible = principal.visible_owner
    if visible is not None and owner not in (None, visible):
        raise _build_problem("owner", "this key sees the jobs of its own owner alone: leave it out")
    return owner or visible


def _read_metadata(request: Request) -> dict[str, str]:
    pairs = {
        name[len("metadata[") : -1]: value
        for name, value in request.query_params.items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    if len(pairs) > MAX_PAIRS:
        raise _build_problem("metadata", f"give at most {MAX_PAIRS} keys")
    return pairs


def _build_problem(field: str, message: str) -> Problem:
    return Problem(422, "invalid-request", f"{field}: {message}", errors=[(field, message)])
