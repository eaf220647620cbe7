"""The application that ``celery -A workers.app worker`` finds, configured by the environment."""

from workers.config.settings import load_settings
from workers.execution.tasks import make_worker

app = make_worker(load_settings())
