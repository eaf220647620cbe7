"""Celery workers and what they share with the API: configuration, the job store in Redis, broker, engines and logs."""
