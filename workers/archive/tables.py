"""The tables of the archive, as the newest migration leaves them."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Column,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    column,
    table,
)

METADATA: Final = MetaData()
_ID = Text().with_variant(Text(collation="C"), "postgresql")  # in the order of Redis
_POSITION = BigInteger().with_variant(Integer, "sqlite")  # SQLite has its row ids in columns of this type alone

JOBS: Final = Table(
    "jobs",
    METADATA,
    Column("n", _POSITION, primary_key=True, autoincrement=False),
    Column("id", _ID, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("dead", Boolean, nullable=False),
    Column("strategy", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("name", Text),
    Column("batch", Text),
    Column("created", Float, nullable=False),
    Column("finished_ms", BigInteger, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("fields", LargeBinary, nullable=False),
)
"""A row for each job: what lists choose by, and its hash of Redis (compressed JSON). ``n``: the order of submission."""

JOURNALS: Final = Table(
    "journals",
    METADATA,
    Column("n", _POSITION, primary_key=True, autoincrement=False),
    Column("entries", LargeBinary, nullable=False),
)
"""The streams of the jobs (compressed JSON)."""

PAIRS: Final = Table(
    "metadata_pairs",
    METADATA,
    Column("digest", BigInteger, primary_key=True, autoincrement=False),
    Column("n", BigInteger, primary_key=True, autoincrement=False),
    sqlite_with_rowid=False,
)
"""The metadata of the jobs: a digest of each key with its value (``filters.digest_pair``)."""

WORDS: Final = Table(
    "job_words", METADATA, Column("n", BigInteger, primary_key=True), Column("words", ARRAY(BigInteger), nullable=False)
)
"""Digests of each job's owner and of the words of its problem, in PostgreSQL: an array with a GIN index."""

LAST_PASS: Final = Table("last_pass", METADATA, Column("number", BigInteger, nullable=False))
"""One row: the number of the last pass that stored jobs. An earlier one that comes late must not."""

FTS: Final = table("job_words", column("rowid"), column("words"))
"""The same in SQLite: a full-text index (FTS5), whose row ids are ``n``, over the digests as words."""
