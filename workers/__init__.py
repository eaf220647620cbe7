"""Celery workers, the job store and the journal in Redis."""
