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
from torch.nn.functional import pad

from engine.attention.layer import AttentionBackend, LayerAttentionConfig, Span
from engine.models.dense_attention import attend_densely
from engine.protocol.types import EngineError

NAME = "reasoner"
"""Name of our functions in transformers' registries."""
_SINKS = "s_aux"
"""Argument of attention functions for a logit of each head that has no value."""
_REFUSED_ARGUMENTS = {"position_bias": "position biases", "alibi": "ALiBi"}
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
        (tokens, heads, _), width = q.shape, v.shape[2]
        size = max(q.shape[2], width)
        out = self._attend(self._layer - 1, *(_widen(x, size) for x in (q, k, v)))
        return out.view(tokens, heads, size)[:, :, :width]

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
        tokens, heads, key_dim = q.shape
        if k.shape[:2] != v.shape[:2] or k.shape[0] != tokens or k.shape[2] != key_dim or heads % k.shape[1]:
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise EngineError(f"attention of queries, keys and values of shapes {shapes}")
        if mask is None or options.get("is_causal") is False:
            raise EngineError("attention that is not causal")
        window, chunk = (number or None for number in mask.flatten().tolist())
        scale = options.get("scaling")
        self.layers.append(
            LayerAttentionConfig(
                heads=heads,
                kv_heads=k.shape[1],
                head_dim=max(key_dim, v.shape[2]),
                scale=key_dim**-0.5 if scale is None else float(scale),
                window=window,
                chunk=chunk,
                sinks=options.get(_SINKS),
                softcap=options.get("softcap"),
            )
        )
        return q.new_zeros(tokens, heads, v.shape[2])

    def mask(self, visible: MaskFunction) -> Tensor | None:
        """Return the lengths of the window and of chunks, 0 for none, in the shape of a mask."""
        span = self._find_span(visible)
        return torch.tensor([[[[span.window or 0, span.chunk or 0]]]])

    def _find_span(self, visible: MaskFunction) -> Span:
        """Return which keys a mask lets a query see. Raises ``EngineError`` if they are neither all before it, nor the
        latest, nor those of its chunk."""
        positions, zero = torch.arange(self._context), torch.zeros((), dtype=torch.int64)

        def sees(queries: Tensor, keys: Tensor) -> Tensor:
            return visible(zero, zero, queries, keys).expand(len(positions))

        hidden = (~sees(positions, zero)).nonzero().flatten().tolist()
        size = hidden[0] if hidden else None  # the first query that does not see the first key
        last = self._context - 1
        near = (0, 1, last // 3, last // 2, last // 2 + 1, last - 1, last)
        queries = sorted({min(max(query, 0), last) for query in (*near, *((size or 0) + step for step in (-1, 0, 1)))})
        for span in (Span(window=size), Span(chunk=size)):
            first_keys = [span.first_key(query) for query in queries]
            if all(
                torch.equal(sees(torch.tensor(query), positions), (positions <= query) & (positions >= first))
                for query, first in zip(queries, first_keys, strict=True)
            ):
                return span
        raise EngineError("a mask that is neither causal nor a sliding window or chunk")


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
    return _CURRENT.get().attention(q, k, v, attention_mask, options)[None], None


def _widen(x: Tensor, size: int) -> Tensor:
    """Return vectors with zeros behind them up to a size: keys and values are stored in the same."""
    return x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1]))


def _mask(*, mask_function: MaskFunction, **_: Any) -> Tensor | None:
    return _CURRENT.get().mask(mask_function)


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
