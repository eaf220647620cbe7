"""Running jobs in a worker process: the Celery tasks, one job from claim to end, and the liveness file."""
