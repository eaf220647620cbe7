"""The service in this process, as the tests of the API have it."""

from tests.api.conftest import settings, work
from tests.workers.fixtures import broker, store, url

__all__ = ["broker", "settings", "store", "url", "work"]
