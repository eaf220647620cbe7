"""Redirect the attention calls of transformers' models: to the engine's attention, or to a tracer.

transformers looks up attention and mask functions by name. Ours pass each call on to the handler of the current
forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from engine.attention.layer import AttentionBackend, LayerAttentionConfig
from engine.models.dense_attention import attend_densely
from engine.protocol.types import EngineError

NAME = "reasoner"
"""Name of our functions in transformers' registries."""
_REFUSED_ARGUMENTS = {"s_aux": "attention sinks", "position_bias": "position biases", "alibi": "ALiBi"}
"""Arguments of attention functions that ours does not support, and their meaning."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


_CURRENT: ContextVar[PagedAttentionHandler | AttentionTracer] = ContextVar("attention_handler")
"""Receiver of the attention calls and of the mask functions of the current forward pass."""


@contextmanager
def handle_attention(handler: PagedAttentionHandler | AttentionTracer) -> Iterator[None]:
    """Send all attention calls made in the block to ``handler``."""
    token = _CURRENT.set(handler)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class PagedAttentionHandler:
    """Handles one step: passes the layers' calls, in their order, to the engine's attention."""

    def __init__(self, attend: AttentionBackend) -> None:
        self._attend = attend
        self._layer = 0

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:  # noqa: ARG002
        self._layer += 1
        return self._attend(self._layer - 1, q, k, v)

    def mask(self, visible: MaskFunction) -> Tensor | None:  # noqa: ARG002
        return None


class AttentionTracer:
    """Records the parameters of each call. The results are zeros."""

    def __init__(self, context: int) -> None:
        self.layers: list[LayerAttentionConfig] = []
        self._context = context

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        for name, feature in _REFUSED_ARGUMENTS.items():
            if options.get(name) is not None:
                raise EngineError(f"{feature} ({name})")
        tokens, heads, head_dim = q.shape
        if k.shape != v.shape or k.shape[0] != tokens or k.shape[2] != head_dim or heads % k.shape[1]:
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise EngineError(f"attention of queries, keys and values of shapes {shapes}")
        if mask is None or options.get("is_causal") is False:
            raise EngineError("attention that is not causal")
        window, scale = int(mask.flatten()[0]), options.get("scaling")
        self.layers.append(
            LayerAttentionConfig(
                heads=heads,
                kv_heads=k.shape[1],
                head_dim=head_dim,
                scale=head_dim**-0.5 if scale is None else float(scale),
                window=window if window < self._context else None,
                softcap=options.get("softcap"),
            )
        )
        return torch.zeros_like(q).flatten(1)

    def mask(self, visible: MaskFunction) -> Tensor | None:
        """Return the length of the window, in the shape of a mask."""
        return torch.full((1, 1, 1, 1), self._window(visible))

    def _window(self, visible: MaskFunction) -> int:
        """Return the number of keys that the last query of the longest sequence sees.

        Raises ``EngineError`` unless every query sees that many of its latest keys.
        """
        last, keys, zero = self._context - 1, torch.arange(self._context), torch.zeros((), dtype=torch.int64)

        def seen(query: int) -> Tensor:
            return visible(zero, zero, torch.tensor(query), keys).expand(self._context)

        window = int(seen(last).sum())
        for query in {0, 1, window - 1, window, window + 1, last // 3, last // 2, last // 2 + 1, last - 1, last}:
            if 0 <= query <= last and not torch.equal(seen(query), (keys <= query) & (keys > query - window)):
                raise EngineError("a mask that is neither causal nor a sliding window, such as chunked attention")
        return window


class DenseAttention:
    """An ``AttentionBackend`` without pages, for the two texts of the self-test."""

    def __init__(self, layers: Sequence[LayerAttentionConfig]) -> None:
        self.num_tokens: list[int] = []
        """Number of tokens of each text in the step."""
        self._layers = layers
        self._cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(torch.split(x, self.num_tokens) for x in (q, k, v)), strict=True)
        outputs = []
        for row, (queries, new_keys, new_values) in enumerate(parts):
            keys, values = self._cache.get((layer, row), (k[:0], v[:0]))
            keys, values = torch.cat((keys, new_keys)), torch.cat((values, new_values))
            self._cache[layer, row] = keys, values
            outputs.append(attend_densely(self._layers[layer], queries, keys, values))
        return torch.cat(outputs)


def _attention(
    _: object, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention function for transformers, ``[1, heads, tokens, dim]`` to ``[1, tokens, heads, dim]``."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _CURRENT.get().attention(q, k, v, attention_mask, options).view(1, *q.shape), None


def _mask(*, mask_function: MaskFunction, **_: Any) -> Tensor | None:
    return _CURRENT.get().mask(mask_function)


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
