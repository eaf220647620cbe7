"""Create the lower tier of a model's cache from the engine's options."""

from __future__ import annotations

import secrets
from hashlib import blake2b
from pathlib import Path

from engine.cache.paged_kv import KVCache
from engine.device import DeviceConfig
from engine.offloading.costs import Costs
from engine.offloading.disk_store import DiskStore
from engine.offloading.host_store import HostStore
from engine.offloading.loads import Loader
from engine.offloading.page_bytes import create_page_bytes, create_state_bytes, describe_layout
from engine.offloading.records import DIGEST_BYTES, DigestChain
from engine.offloading.run_folder import GIB, RunFolder, check_folder
from engine.offloading.stats import OffloadingStats
from engine.offloading.tier import OffloadingTier
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError

_DEFAULT_DISK_GB = 10.0
_DEFAULT_HOST_GB = 1.0
"""Host memory on the way from a GPU to a disk, whose writer would else keep steps waiting."""


def check_offloading(options: EngineOptions, device_config: DeviceConfig) -> None:
    """Raise ``EngineError`` unless the lower tier that the options ask for can be created, before weights are read."""
    if options.cache_host_gb and not device_config.uses_gpu_kernels:
        raise EngineError(
            "cache_host_gb is for GPUs: on a CPU keys and values are in the memory of the host already; use kv_tokens "
            "for more of them, or cache_disk"
        )
    if options.cache_disk is not None:
        check_folder(Path(options.cache_disk).expanduser(), _get_disk_bytes(options))
    elif options.cache_disk_gb is not None:
        raise EngineError("cache_disk_gb is the size of files in cache_disk: name that folder, too, or leave it out")


def create_loader(cache: KVCache, options: EngineOptions, fingerprint: str, costs: Costs) -> Loader | None:
    """Connect a cache, which is empty, to the lower tier that the options ask for; return what loads from it.

    ``fingerprint``: of the checkpoint. Raises ``EngineError`` if the folder cannot be created.
    """
    if options.cache_disk is None and not options.cache_host_gb:
        return None
    layout = f"{fingerprint} {describe_layout(cache)}"
    page_bytes, state_bytes = create_page_bytes(cache), create_state_bytes(cache)
    tier = OffloadingTier(
        cache,
        DigestChain(secrets.token_bytes(DIGEST_BYTES), layout),
        page_bytes=page_bytes,
        state_bytes=state_bytes,
        stats=OffloadingStats(),
    )
    host_gb = options.cache_host_gb or (_DEFAULT_HOST_GB if cache.data.device.type == "cuda" else 0.0)
    if host_gb:
        row_bytes = page_bytes.num_bytes or (1 if state_bytes is None else state_bytes.num_bytes)
        try:
            tier.host = HostStore(int(host_gb * GIB), row_bytes, cache.data.device, on_evict=tier.move_to_disk)
        except RuntimeError as error:
            raise EngineError(f"cache_host_gb {host_gb:g}: the host cannot give this memory: {error}") from None
    if options.cache_disk is not None:
        tier.disk = DiskStore(
            RunFolder(Path(options.cache_disk).expanduser()),
            blake2b(layout.encode(), digest_size=DIGEST_BYTES).digest(),
            max_bytes=_get_disk_bytes(options),
            stats=tier.stats,
            on_lost=tier.drop_lost,
        )
    cache.connect(tier)
    return Loader(cache, tier, costs)


def _get_disk_bytes(options: EngineOptions) -> int:
    return int((options.cache_disk_gb or _DEFAULT_DISK_GB) * GIB)
