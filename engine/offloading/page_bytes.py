"""The bytes of one page, or of one state, of a cache: gathered from all its tensors, and scattered back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.cache.paged_kv import KVCache

_PAGE_DIMENSION = 3


class SlotBytes:
    """The bytes at one index of some tensors, one tensor after the other. Copies keep every bit."""

    def __init__(self, tensors: Sequence[Tensor], dimension: int) -> None:
        """``dimension``: that of the index, the same in all tensors."""
        self._views = [tensor.view(torch.uint8).movedim(dimension, 0) for tensor in tensors]
        self._sizes = [math.prod(view.shape[1:]) for view in self._views]
        self.num_bytes = sum(self._sizes)
        self._device = tensors[0].device if tensors else torch.device("cpu")

    def read(self, index: int) -> Tensor:
        """Return a copy ``[num_bytes]`` on the device of the tensors, in the order of the current stream."""
        data = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        for view, part in zip(self._views, torch.split_with_sizes(data, self._sizes), strict=True):
            part.view(view.shape[1:]).copy_(view[index])
        return data

    def write(self, index: int, data: Tensor) -> None:
        """Write bytes ``[num_bytes]`` from any device, in the order of the current stream."""
        moved = data.to(self._device, non_blocking=True)
        for view, part in zip(self._views, torch.split_with_sizes(moved, self._sizes), strict=True):
            view[index].copy_(part.view(view.shape[1:]))


def create_page_bytes(cache: KVCache) -> SlotBytes:
    """Return the bytes of a cache's pages: of the keys and values of all layers, a drafter's included, with scales."""
    return SlotBytes(cache.slot_tensors, _PAGE_DIMENSION)


def create_state_bytes(cache: KVCache) -> SlotBytes | None:
    """Return the bytes of a cache's states, if it has any."""
    if cache.states is None:
        return None
    return SlotBytes([tensor.flatten(1) for layer in cache.states.layers for tensor in layer], 0)


def describe_layout(cache: KVCache) -> str:
    """Return what must be equal for the bytes of two caches to mean the same."""
    tensors = [(tuple(tensor.shape[:3]), tuple(tensor.shape[4:]), str(tensor.dtype)) for tensor in cache.slot_tensors]
    states = [] if cache.states is None else [tuple(one.shape[1:]) for layer in cache.states.layers for one in layer]
    return repr((cache.page_size, tensors, states))
