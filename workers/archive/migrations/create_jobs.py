"""Create the tables of jobs, journals, metadata and words."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "create_jobs"
down_revision: str | None = None

_FILTERS = ("status", "dead", "strategy", "model", "name")


def upgrade() -> None:
    position = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    job_id = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")  # in the order of Redis
    op.create_table(
        "jobs",
        sa.Column("n", position, primary_key=True, autoincrement=False),
        sa.Column("id", job_id, nullable=False, unique=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("dead", sa.Boolean, nullable=False),
        sa.Column("strategy", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("name", sa.Text),
        sa.Column("batch", sa.Text),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("finished_ms", sa.BigInteger, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("fields", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "journals",
        sa.Column("n", position, primary_key=True, autoincrement=False),
        sa.Column("entries", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "metadata_pairs",
        sa.Column("digest", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("n", sa.BigInteger, primary_key=True, autoincrement=False),
        sqlite_with_rowid=False,
    )
    op.create_index("metadata_pairs_n", "metadata_pairs", ["n"])
    # Each filter alone, and each of one owner, in the order of lists.
    op.create_index("jobs_owner", "jobs", ["owner", "n"])
    for column in _FILTERS:
        op.create_index(f"jobs_{column}", "jobs", [column, "n"])
        op.create_index(f"jobs_owner_{column}", "jobs", ["owner", column, "n"])
    op.create_index("jobs_created", "jobs", ["created", "n"])
    op.create_index("jobs_finished", "jobs", ["finished_ms", "id"])
    op.create_index("jobs_owner_finished", "jobs", ["owner", "finished_ms", "id"])
    if op.get_context().dialect.name == "sqlite":
        op.execute("CREATE VIRTUAL TABLE job_words USING fts5(words, detail='none', tokenize='ascii')")
        return
    op.create_table(
        "job_words",
        sa.Column("n", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("words", sa.ARRAY(sa.BigInteger), nullable=False),
    )
    op.create_index("job_words_words", "job_words", ["words"], postgresql_using="gin")
