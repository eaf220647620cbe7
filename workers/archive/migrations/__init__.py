"""The migrations of the archive's database, in Alembic's form: each names the one before it."""
