"""The message broker: the embedded Valkey or Redis, Celery's application and transport, and the reaper."""
