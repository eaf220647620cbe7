"""Create the table of the last pass that stored jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "number_passes"
down_revision: str | None = "create_jobs"


def upgrade() -> None:
    last_pass = op.create_table("last_pass", sa.Column("number", sa.BigInteger, nullable=False))
    op.bulk_insert(last_pass, [{"number": 0}])
