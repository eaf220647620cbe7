"""What the service adds to a search, and what it bears: durable jobs beside Celery alone and beside no service."""
