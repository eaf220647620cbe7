"""Lower tiers for caches of tests, which load whatever they have."""

from __future__ import annotations

from pathlib import Path

from engine.cache.paged_kv import KVCache
from engine.offloading.costs import Costs
from engine.offloading.loads import Loader
from engine.offloading.run_folder import GIB
from engine.offloading.setup import create_loader
from engine.protocol.options import EngineOptions


class FreeLoads(Costs):
    """Costs by which loading is always cheaper: toy models compute a page faster than a disk reads one."""

    def is_load_cheaper(self, num_tokens: int, *, disk_bytes: int, num_bytes: int) -> bool:
        return True


def add_tier(
    cache: KVCache, folder: Path | None, *, disk_bytes: int = 1 << 20, host_bytes: int = 0, costs: Costs | None = None
) -> Loader:
    """Connect a cache to a lower tier on disk, in host memory, or both."""
    options = EngineOptions(
        cache_disk=None if folder is None else str(folder),
        cache_disk_gb=disk_bytes / GIB,
        cache_host_gb=host_bytes / GIB,
    )
    loader = create_loader(cache, options, "checkpoint", costs or FreeLoads())
    assert loader is not None
    return loader


def list_files(folder: Path) -> list[Path]:
    """Return the files of records, oldest first."""
    return sorted(folder.glob("*/*.kv"), key=lambda path: int(path.stem))


def flush(loader: Loader) -> None:
    """Wait until everything that was evicted is on disk."""
    assert loader.tier.disk is not None
    loader.tier.disk.flush()
