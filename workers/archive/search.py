"""Queries that list archived jobs by a filter, from newest to oldest."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import BigInteger, ColumnElement, Select, cast, exists, func, literal_column, select
from sqlalchemy.dialects.postgresql import ARRAY, array
from sqlalchemy.ext.asyncio import AsyncConnection

from workers.archive.filters import DEAD, JobFilter, digest_pair, digest_words
from workers.archive.record import render_digests
from workers.archive.tables import FTS, JOBS, PAIRS, WORDS

_FEW: Final = 1000
"""Jobs of a pair of the metadata that are looked up faster than the words are searched."""


async def select_filtered(
    connection: AsyncConnection, wanted: JobFilter, *, owner: str | None, before: int | None, limit: int
) -> Select[Any]:
    """Return the query for positions and hashes of the jobs that a filter wants, behind the position ``before``.

    One index leads, in the order of the list: of a pair of the metadata, of the words, or of the columns. The others
    are looked up for each of its jobs, so a pair that few jobs have leads before frequent words.
    """
    pairs = await _sort_pairs(connection, wanted)
    words = digest_words(owner, wanted.words) if wanted.words else set()
    position: ColumnElement[int] = JOBS.c.n
    query: Select[Any] = select(JOBS.c.n, JOBS.c.fields)
    if words and connection.dialect.name == "sqlite":
        matches = literal_column("job_words").op("MATCH")(render_digests(sorted(words)))
        if pairs and pairs[0][0] < _FEW:
            query = query.where(exists().where(matches, FTS.c.rowid == JOBS.c.n))
        else:
            position = FTS.c.rowid
            query = query.join_from(FTS, JOBS, JOBS.c.n == position).where(matches)
    elif words:
        terms = cast(array(sorted(words)), ARRAY(BigInteger))
        query = query.where(JOBS.c.n.in_(select(WORDS.c.n).where(WORDS.c.words.bool_op("@>")(terms))))
    for _, digest in pairs:
        if position is JOBS.c.n:
            position = PAIRS.c.n
            query = query.join_from(PAIRS, JOBS, JOBS.c.n == position).where(PAIRS.c.digest == digest)
        else:
            others = PAIRS.alias()
            query = query.where(exists().where(others.c.digest == digest, others.c.n == JOBS.c.n))
    for condition in _list_conditions(wanted, owner):
        query = query.where(condition)
    lowest, highest = await _find_positions(connection, wanted)
    if lowest is not None:
        query = query.where(position >= lowest)
    bounds = [bound for bound in (before, highest) if bound is not None]
    if bounds:
        query = query.where(position < min(bounds))
    return query.order_by(position.desc()).limit(limit)


async def _sort_pairs(connection: AsyncConnection, wanted: JobFilter) -> list[tuple[int, int]]:
    """Return the digests of the metadata, those of the fewest jobs first, each with their number up to ``_FEW``."""
    pairs = []
    for key, value in wanted.metadata.items():
        digest = digest_pair(key, value)
        rows = select(PAIRS.c.n).where(PAIRS.c.digest == digest).limit(_FEW).subquery()
        pairs.append(((await connection.execute(select(func.count()).select_from(rows))).scalar_one(), digest))
    return sorted(pairs)


def _list_conditions(wanted: JobFilter, owner: str | None) -> list[ColumnElement[bool]]:
    """Return the conditions on columns of the jobs."""
    status = None if wanted.status == DEAD else wanted.status
    columns = {
        "owner": owner,
        "status": status,
        "strategy": wanted.strategy,
        "model": wanted.model,
        "name": wanted.name,
    }
    conditions = [JOBS.c[name] == value for name, value in columns.items() if value is not None]
    if wanted.status == DEAD:
        conditions.append(JOBS.c.dead)
    if wanted.created_after is not None:
        conditions.append(JOBS.c.created >= wanted.created_after)
    if wanted.created_before is not None:
        conditions.append(JOBS.c.created < wanted.created_before)
    return conditions


async def _find_positions(connection: AsyncConnection, wanted: JobFilter) -> tuple[int | None, int | None]:
    """Return the first position of the time that is wanted, and the first one behind it; ``None`` where it is open.

    Positions are in the order of submission, so a time is a range of them.
    """

    async def find_first(moment: float | None) -> int | None:
        if moment is None:
            return None
        query = select(JOBS.c.n).where(JOBS.c.created >= moment).order_by(JOBS.c.created, JOBS.c.n).limit(1)
        n: int | None = (await connection.execute(query)).scalar_one_or_none()
        return n

    lowest = await find_first(wanted.created_after)
    if wanted.created_after is not None and lowest is None:
        return 0, 0  # nothing is that new
    return lowest, await find_first(wanted.created_before)
