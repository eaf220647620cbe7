"""Paged attention on a GPU by FlashInfer's kernels, in the steps that they were measured to compute faster.

FlashInfer reads 16-bit keys and values in our pages, as views with pages and heads swapped. Triton's kernels compute
all other steps. The names and types of arguments are those of flashinfer-python 0.7.2.post1, and the same in 0.6.18.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.cuda_triton import MAX_REPEATABLE_QUERIES, TritonAttention
from engine.attention.layer import LayerAttentionConfig
from engine.attention.plan import AttentionMetadata, IntArray, find_shared_prefixes
from engine.device import to_device

PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"

_HEAD_DIMS, _DTYPES = (64, 128, 256), (torch.float16, torch.bfloat16)
_MIN_WORKSPACE = 128 << 20
"""Bytes that FlashInfer recommends for the partial results of split keys."""

_log = logging.getLogger(__name__)


class Limits(NamedTuple):
    """The parameters of a layer's attention that a plan fixes."""

    window: int | None
    softcap: float | None
    scale: float

    @classmethod
    def of(cls, layer: LayerAttentionConfig) -> Limits:
        """Return the parameters of a layer."""
        return cls(layer.window, layer.softcap, layer.scale)


class StepArrays(NamedTuple):
    """A step's rows as FlashInfer takes them, int32 on the host."""

    query_starts: Tensor
    """``[rows + 1]`` first flat token of each row, and their number."""
    page_starts: Tensor
    """``[rows + 1]`` first entry of each row in ``pages``, and their number."""
    pages: Tensor
    """Pages of all rows, one row after the other."""
    last_page_lens: Tensor
    """``[rows]`` tokens in each row's last page, from 1."""


class FlashInferAttention(TritonAttention):
    """A ``FusedAttentionBackend`` that leaves some steps to FlashInfer.

    Steps that a CUDA graph may be captured from stay with Triton's kernels: a replay reads its plan at fixed addresses,
    and FlashInfer's plan chooses grids by the lengths of each step. So do trees of draft tokens, for which FlashInfer
    needs a mask of every key, and steps in which a shared prefix is read once.
    """

    def __init__(
        self,
        layers: Sequence[LayerAttentionConfig],
        kv: Tensor,
        flashinfer: ModuleType,
        is_faster: Callable[[AttentionMetadata], bool],
        *,
        has_graphs: bool,
    ) -> None:
        """``kv``: see ``TritonAttention``, of 16 bits. ``has_graphs``: repeatable steps are captured."""
        super().__init__(layers, kv)
        self._is_faster, self._has_graphs = is_faster, has_graphs
        self._pages = [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in kv]
        # Not shared with other models, whose steps run beside this one's.
        num_bytes = _count_workspace_bytes(layers[0], self._programs)
        workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=kv.device)
        limits = dict.fromkeys(map(Limits.of, layers))
        options = {"kv_layout": "HND", "backend": "fa2"}
        self._wrappers = {PREFILL: {each: getattr(flashinfer, PREFILL)(workspace, **options) for each in limits}}
        if not has_graphs:
            # Other kernels than those of the matrix units take few numbers of query heads for a key-value head.
            create = getattr(flashinfer, DECODE)
            self._wrappers[DECODE] = {each: create(workspace, use_tensor_cores=True, **options) for each in limits}
        self._planned: Mapping[Limits, Any] = {}
        """Planned wrappers of the prepared step by the parameters of layers; none if it is Triton's."""
        self._copied = torch.cuda.Event() if kv.is_cuda else None  # type: ignore[no-untyped-call]
        one = np.ones(1, np.int64)
        for name in self._wrappers:  # FlashInfer compiles its kernels when it plans, which no request should wait for
            self._plan_wrappers(name, lay_out_pages(np.zeros((1, 1), np.int64), one, one, kv.shape[4]))

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._planned = {}
        if not self._should_use(metadata):
            super().prepare(metadata)
            return
        self.is_repeatable, self.buffers, self._work = False, (), {}
        self._slots = to_device(torch.from_numpy(metadata.slots), self._kv.device)
        name = DECODE if metadata.is_decode else PREFILL
        self._planned = self._plan_wrappers(
            name, lay_out_pages(metadata.page_table, metadata.query_lens, metadata.seq_lens, metadata.page_size)
        )

    def _should_use(self, metadata: AttentionMetadata) -> bool:
        is_repeatable = int(metadata.query_lens.max()) <= MAX_REPEATABLE_QUERIES
        if metadata.tree_masks or (self._has_graphs and is_repeatable) or not self._is_faster(metadata):
            return False
        if None not in self._windows:  # with a window no prefix is read once
            return True
        num_full_pages = (metadata.seq_lens - metadata.query_lens) // metadata.page_size
        return not find_shared_prefixes(metadata, num_full_pages)[1]

    def _plan_wrappers(self, name: str, arrays: StepArrays) -> Mapping[Limits, Any]:
        """Plan a step for all layers and return the wrappers.

        FlashInfer copies to the device: the arrays, which are pinned; the rows' lengths, which are few bytes and staged
        by the driver; and what it plans, from pinned memory of its own. None of this waits for the device. But the last
        plan's copy may not have begun when that memory is written again, and so it is waited for here.
        """
        if self._kv.is_cuda:
            arrays = StepArrays(*(array.pin_memory() for array in arrays))
        if self._copied is not None:
            self._copied.synchronize()
        about, dtype = self._layers[0], self._kv.dtype
        sizes = about.heads, about.kv_heads, about.head_dim, self._kv.shape[4]
        rows = arrays if name == PREFILL else arrays[1:]
        mask = {"causal": True} if name == PREFILL else {}
        for limits, wrapper in self._wrappers[name].items():
            wrapper.plan(
                *rows,
                *sizes,
                **mask,
                window_left=count_earlier_keys(limits.window),
                logits_soft_cap=limits.softcap,
                sm_scale=limits.scale,
                q_data_type=dtype,
                kv_data_type=dtype,
            )
        if self._copied is not None:
            self._copied.record()
        return self._wrappers[name]

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        if not self._planned:
            return super()._attend(layer, q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # FlashInfer would fill its own with zeros first
        self._planned[Limits.of(self._layers[layer])].run(q, self._pages[layer], out=out)
        return out


def count_earlier_keys(window: int | None) -> int:
    """Return the number of keys before its own that a query sees, as FlashInfer takes it: -1 for all."""
    return -1 if window is None else window - 1


def lay_out_pages(page_table: IntArray, query_lens: IntArray, seq_lens: IntArray, page_size: int) -> StepArrays:
    """Return the rows of a step, see ``AttentionMetadata``, as FlashInfer takes them."""
    num_pages = -(-seq_lens // page_size)
    is_used = np.arange(page_table.shape[1]) < num_pages[:, None]
    arrays = (
        np.concatenate(([0], np.cumsum(query_lens))),
        np.concatenate(([0], np.cumsum(num_pages))),
        page_table[is_used],
        seq_lens - (num_pages - 1) * page_size,
    )
    return StepArrays(*(torch.from_numpy(array.astype(np.int32)) for array in arrays))


def is_supported(layers: Sequence[LayerAttentionConfig], kv: Tensor) -> bool:
    """Return True if FlashInfer has kernels for the layers over a cache like ``kv``."""
    return kv.dtype in _DTYPES and layers[0].head_dim in _HEAD_DIMS


@cache
def load_flashinfer() -> ModuleType | None:
    """Return the package FlashInfer, or log why it is not used and return ``None``."""
    if find_spec("flashinfer") is None:
        _log.info("FlashInfer, which is faster for some steps on this GPU, is not installed")
        return None
    flashinfer = importlib.import_module("flashinfer")
    version = getattr(flashinfer, "__version__", "of an unknown version")
    if missing := find_missing(flashinfer):
        _log.warning("FlashInfer %s is not used, Triton's kernels are: %s", version, missing)
        return None
    _log.info("FlashInfer %s computes the attention of steps that were measured to be faster with it", version)
    return flashinfer


def find_missing(flashinfer: ModuleType) -> str | None:
    """Return a message that names what is used here and the package lacks; ``None`` if it lacks nothing."""
    options = ("window_left", "logits_soft_cap", "sm_scale", "q_data_type", "kv_data_type")
    for name, num_arrays, created, planned in (
        (PREFILL, 4, (), ("causal", *options)),
        (DECODE, 3, ("use_tensor_cores",), options),
    ):
        calls = {
            "__init__": (1, ("kv_layout", "backend", *created)),
            "plan": (num_arrays + 4, planned),
            "run": (2, ("out",)),
        }
        for method, (num_positional, keywords) in calls.items():
            try:
                function = getattr(getattr(flashinfer, name), method)
                inspect.signature(function).bind(*[None] * (1 + num_positional), **dict.fromkeys(keywords))
            except (AttributeError, TypeError) as error:
                return f"{name}.{method}: {error}"
    return None


def _count_workspace_bytes(layer: LayerAttentionConfig, programs: int) -> int:
    """Return the bytes of partial results, float32 with a sum for each, of as many tiles as keys are split for.

    ``programs``: two for each multiprocessor, as in FlashInfer's plan, whose tiles have up to 128 rows.
    """
    num_rows = programs * 128 * (layer.heads // layer.kv_heads)
    return max(_MIN_WORKSPACE, num_rows * (layer.head_dim + 1) * 4 + 4096)
