"""Set up one model from its options: device, weights, size of the KV cache, and drafter."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from engine.adapters.checkpoint import read_adapter
from engine.attention.layer import HeadShape
from engine.cache.key_pool import check_head_dim, kv_bytes_per_token
from engine.core.gpu_memory import GpuMemory, NotEnoughMemory, measure_peak
from engine.device import DeviceConfig, select_device, select_kv_dtype
from engine.gpu_requirements import check_gpu
from engine.models.by_transformers.model import TransformersModel
from engine.models.config import ModelConfig, read_raw_config
from engine.models.interface import Model
from engine.models.load import choose_decoder, load_model
from engine.offloading.setup import check_offloading
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError
from engine.runner.largest_step import run_largest_step
from engine.runner.states import check_slots, count_slots
from engine.speculation.control.adaptive import AdaptiveController
from engine.speculation.drafter import Drafter
from engine.speculation.load import (
    MAX_NODES,
    check_kv_dtype,
    check_length,
    list_key_shapes,
    load_drafter,
    max_own_bytes,
)
from engine.speculation.speculator import Speculator

_log = logging.getLogger(__name__)

_DEFAULT_KV_BYTES = 1 << 30
_DEFAULT_KV_TOKENS = 1 << 17
_PURE_TOKENS = 1 << 20
"""Tokens that the cache of a GPU knows of a model whose layers all keep states, so that they take no memory there."""
_STATES_PART = 4
"""Part of the GPU's memory for a cache, 1 in so many, that states may take by default."""


def select_model_device(folder: Path, options: EngineOptions) -> DeviceConfig:
    """Return the device for the model in ``folder``; raise ``EngineError`` if the requested one does not support it."""
    choice, cpu_only_reason = choose_decoder(read_raw_config(folder), strict_config=options.strict_config), None
    if isinstance(choice, str):
        cpu_only_reason = f"{choice}: transformers runs it, on the CPU alone"
    elif choice.cpu_only_part is not None:
        cpu_only_reason = f"{folder} has {choice.cpu_only_part}: they are computed on the CPU alone"
    device_config = select_device(options.device, options.dtype, cpu_only_reason=cpu_only_reason)
    device_config = replace(device_config, is_batch_invariant=options.deterministic)
    if device_config.device.type == "cuda":
        check_gpu(device_config.device)
    return device_config


class ModelWeights:
    """Weights of a model and its drafter on their device, before its KV cache has a size.

    All models of an engine are loaded before the first cache is allocated: caches share the memory that weights leave.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        options: EngineOptions,
        memory: GpuMemory | None = None,
        template: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        """Load the checkpoint in ``folder``; raise ``EngineError`` with the reason if it is invalid.

        ``memory``: of the GPU, shared with other models; ``None`` if there is no other.
        ``template``: a chat template that takes the place of the checkpoint's own. ``adapters``: the folders of LoRA
        adapters by name.
        """
        self.name, self._options, self.template = name, options, template
        self._memory = memory = GpuMemory(options.gpu_memory_utilization) if memory is None else memory
        keep_freed_memory()
        self.folder = folder
        self.device_config = select_model_device(folder, options)
        check_offloading(options, self.device_config)
        self.kv_dtype = select_kv_dtype(options.kv_dtype, self.device_config)
        self._is_sized_by_gpu = self.device_config.uses_gpu_kernels and options.kv_tokens is None
        allowed = memory.open(self.device_config.device) if self._is_sized_by_gpu else 0
        self.adapters = [read_adapter(adapter, Path(path)) for adapter, path in (adapters or {}).items()]
        _compile_cpu_kernels(self.device_config)
        try:
            self.model = load_model(
                folder,
                lambda config: self._bound_tokens(config, allowed),
                self.device_config,
                strict_config=options.strict_config,
                adapters=self.adapters,
            )
            context = min(self.model.config.max_context, self._bound_tokens(self.model.config, allowed))
            self.drafter = _load_drafter(folder, self.model, options, context)
        except torch.OutOfMemoryError:
            raise NotEnoughMemory(
                f"{folder}: the weights need more memory than this GPU has free: use a larger GPU, or a checkpoint "
                "with fewer bits"
            ) from None
        if options.deterministic and isinstance(self.model, TransformersModel):
            raise EngineError(f"{folder}: deterministic mode is not supported for architectures run by transformers")
        self.num_state_slots = count_slots(self.model.config, options)
        """Slots of states; on a GPU that decides the size of the cache they are known when that is."""
        if self._is_sized_by_gpu:
            memory.add(name, step=self._measure_largest_step(context), drafter=max_own_bytes(self.drafter))

    @property
    def bytes_per_token(self) -> int:
        """Size of one token's keys and values in all layers, the drafter's included."""
        return self._bytes_per_token(self.model.config)

    def choose_num_tokens(self) -> int:
        """Return how many tokens the KV cache holds: whole pages, at least one. Called once, when all are loaded."""
        config, device, options = self.model.config, self.device_config.device, self._options
        if not self._is_sized_by_gpu:
            return self._bound_tokens(config, 0)
        if config.states:
            share = max(0, self._memory.measure_share(device)) // (_STATES_PART if self.bytes_per_token else 1)
            self.num_state_slots = count_slots(config, options, share)
        state_bytes = self.num_state_slots * config.state_bytes
        least = min(config.max_context, options.step_tokens)
        num_tokens = self._memory.take(self.name, device, self.bytes_per_token, least, state_bytes=state_bytes)
        _log.info("model %s: %d tokens of keys and values fit into the GPU's memory", self.name, num_tokens)
        return self._whole_pages(num_tokens if self.bytes_per_token else min(num_tokens, _PURE_TOKENS))

    def _bound_tokens(self, config: ModelConfig, allowed: int) -> int:
        """Return an upper bound of the cache's tokens, its size unless the GPU's memory decides.

        ``allowed``: bytes of the GPU's memory. Raises ``EngineError``, before the weights are read, if the dtype does
        not hold the model's heads or its drafter's.
        """
        for shape in self._list_shapes(config):
            check_head_dim(shape.head_dim, self.kv_dtype)
        check_slots(config, self._options)
        if not config.num_labels:
            check_kv_dtype(self._options.draft, self.folder, self.kv_dtype)
        bytes_per_token = self._bytes_per_token(config)
        if self._is_sized_by_gpu:
            return self._whole_pages(allowed // bytes_per_token if bytes_per_token else _PURE_TOKENS)
        default = min(_DEFAULT_KV_TOKENS, _DEFAULT_KV_BYTES // max(1, bytes_per_token))
        return self._whole_pages(self._options.kv_tokens or default)

    def _bytes_per_token(self, config: ModelConfig) -> int:
        return sum(kv_bytes_per_token(shape, self.kv_dtype) for shape in self._list_shapes(config))

    def _list_shapes(self, config: ModelConfig) -> list[HeadShape]:
        """Return the shapes of all layers of keys and values, those of the drafter last."""
        draft_shapes = [] if config.num_labels else list_key_shapes(self._options.draft, self.folder, config)
        return [*config.head_shapes, *draft_shapes]

    def _whole_pages(self, num_tokens: int) -> int:
        return max(1, num_tokens // self._options.page_size) * self._options.page_size

    def _measure_largest_step(self, context: int) -> int:
        """Return the bytes that the largest step needs. Raises ``NotEnoughMemory`` if it needs more than there is."""
        options = self._options
        per_sequence = 1 if self.drafter is None else 1 + MAX_NODES
        try:
            return measure_peak(
                self.device_config.device,
                lambda: run_largest_step(
                    self.model,
                    self.kv_dtype,
                    page_size=options.page_size,
                    num_tokens=options.step_tokens,
                    num_sampled=min(options.step_tokens, options.max_running * per_sequence),
                    context=context,
                ),
            )
        except torch.OutOfMemoryError:
            raise NotEnoughMemory(
                f"model {self.name!r} leaves too little of this GPU's memory for a step of {options.step_tokens} "
                "tokens: use a larger GPU, a checkpoint with fewer bits, or fewer --step-tokens"
            ) from None


def create_speculator(drafter: Drafter | None, options: EngineOptions, *, context: int) -> Speculator | None:
    """Return the speculation with a drafter; ``None`` without one."""
    if drafter is None:
        return None
    controller = AdaptiveController(options.draft_length, MAX_NODES)
    return Speculator(drafter, controller, context=context, trees=not options.deterministic)


def _load_drafter(folder: Path, model: Model, options: EngineOptions, context: int) -> Drafter | None:
    """Load the drafter that the options select; ``None`` for none, and for classifiers, which do not generate."""
    check_length(options.draft_length)
    return None if model.config.num_labels else load_drafter(options.draft, folder, model, context=context)


def keep_freed_memory() -> None:
    """Make the C library keep freed blocks of up to 31 MiB for the next step.

    By default it returns them to the kernel, which clears them page by page when the next step allocates them again: a
    sixth of a step's time. Freeing one large block, never touched, raises the threshold (mallopt(3), M_MMAP_THRESHOLD).
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def _compile_cpu_kernels(device_config: DeviceConfig) -> None:
    """Compile the kernels that steps on the CPU run; a GPU needs none of them."""
    if not device_config.uses_gpu_kernels:
        from kernels.cpu.precompile import compile_kernels

        compile_kernels()
