"""Fixtures that run the service in this process, shared with the tests of the API."""

from tests.api.conftest import settings, work
from tests.workers.fixtures import broker, store, url

__all__ = ["broker", "settings", "store", "url", "work"]
