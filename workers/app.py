"""Entry point of ``celery -A workers.app worker``, configured by the environment."""

from workers.config.settings import load_settings
from workers.execution.tasks import make_worker

app = make_worker(load_settings())
