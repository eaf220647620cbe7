from tests.workers.fixtures import broker, store, url

__all__ = ["broker", "store", "url"]
