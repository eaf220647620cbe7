"""Pages of lists: newest first, a cursor and a limit."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel

from api.http.problems import Problem
from workers.store.history import JobListing

T = TypeVar("T")

After = Annotated[str | None, Query(description="The 'last_id' of the page before.")]
Limit = Annotated[int, Query(ge=1, le=100)]


class Page(BaseModel, Generic[T]):
    """``last_id`` is what ``after`` takes to get the next page."""

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


def build_page(items: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return the page of the first ``limit`` items; one item more than that shows that there are further pages."""
    data = items[:limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "first_id": first, "last_id": last, "has_more": len(items) > limit}


def build_listing(listing: JobListing) -> dict[str, Any]:
    """Return the page of a list of jobs."""
    first = listing.jobs[0]["id"] if listing.jobs else None
    return {"data": listing.jobs, "first_id": first, "last_id": listing.cursor, "has_more": listing.has_more}


def unknown_cursor(kind: str, after: str | None) -> Problem:
    """Return the problem of a page that should begin after an item that does not exist."""
    message = f"there is no {kind} {after!r}: give the 'last_id' of the page before"
    return Problem(400, "unknown-cursor", message, errors=[("after", message)])
