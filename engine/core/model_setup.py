"""Set up one model from its options: device, capacity of the key-value pool, and drafter."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.cache.paged_kv import KVCache, check_head_dim, kv_bytes_per_token
from engine.device import DeviceConfig, select_device
from engine.models.config import ModelConfig, read_raw_config
from engine.models.interface import Model
from engine.models.load import choose_decoder
from engine.protocol.options import EngineOptions
from engine.speculation.control.adaptive import AdaptiveController
from engine.speculation.load import MAX_NODES, check_length, extra_layers, load_drafter
from engine.speculation.speculator import Speculator

_DEFAULT_KV_BYTES = 1 << 30
_DEFAULT_KV_TOKENS = 1 << 17


def select_model_device(folder: Path, options: EngineOptions) -> DeviceConfig:
    """Return the device for the model in ``folder``; raise ``EngineError`` if the requested one does not support it."""
    choice, cpu_only_reason = choose_decoder(read_raw_config(folder), strict_config=options.strict_config), None
    if options.deterministic:
        cpu_only_reason = "deterministic mode is for the CPU alone"
    elif isinstance(choice, str):
        cpu_only_reason = f"{choice}: transformers runs it, on the CPU alone"
    return select_device(options.device, options.dtype, cpu_only_reason=cpu_only_reason)


class KVCapacity:
    """Capacity of the key-value pool of the model in a folder, its drafter's layers included."""

    def __init__(self, folder: Path, options: EngineOptions, kv_dtype: torch.dtype) -> None:
        self._options = options
        self._kv_dtype = kv_dtype
        self._num_draft_layers = extra_layers(options.draft, folder)

    def num_tokens(self, config: ModelConfig) -> int:
        """Return how many tokens the pool holds: whole pages, at least one.

        Raises ``EngineError``, before the weights are read, if the dtype does not hold the model's heads.
        """
        check_head_dim(config.head_dim, self._kv_dtype)
        options = self._options
        num_tokens = options.kv_tokens or min(_DEFAULT_KV_TOKENS, _DEFAULT_KV_BYTES // self.bytes_per_token(config))
        return max(1, num_tokens // options.page_size) * options.page_size

    def bytes_per_token(self, config: ModelConfig) -> int:
        """Return the size of one token's keys and values in all layers."""
        num_layers = config.num_layers + (0 if config.num_labels else self._num_draft_layers)
        return num_layers * kv_bytes_per_token(config.attention[0], self._kv_dtype)


def create_cache(
    config: ModelConfig,
    options: EngineOptions,
    num_draft_layers: int,
    pages: int,
    context: int,
    device_config: DeviceConfig,
    dtype: torch.dtype,
) -> KVCache:
    """Create an empty cache of ``pages`` pages for a model and its drafter's layers."""
    return KVCache(
        layers=config.num_layers + num_draft_layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        pages=pages,
        page_size=options.page_size,
        rows=options.max_running,
        context=context,
        device_config=device_config,
        dtype=dtype,
        max_pinned=int(pages * options.lease_share),
        lease_seconds=options.lease_seconds,
    )


def load_speculator(folder: Path, model: Model, options: EngineOptions, *, context: int) -> Speculator | None:
    """Load the drafter that the options select; ``None`` for none, and for classifiers, which do not generate."""
    check_length(options.draft_length)
    if model.config.num_labels:
        return None
    drafter = load_drafter(options.draft, folder, model, context=context)
    if drafter is None:
        return None
    controller = AdaptiveController(options.draft_length, MAX_NODES)
    return Speculator(drafter, controller, context=context, trees=not options.deterministic)


def keep_freed_memory() -> None:
    """Make the C library keep freed blocks of up to 31 MiB for the next step.

    By default it returns them to the kernel, which clears them page by page when the next step allocates them again: a
    sixth of a step's time. Freeing one large block, never touched, raises the threshold (mallopt(3), M_MMAP_THRESHOLD).
    """
    torch.empty(31 << 20, dtype=torch.uint8)
