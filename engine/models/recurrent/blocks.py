"""The blocks of which the layers of models with Mamba-2 consist.

A block adds to the hidden states what its part makes of their norm. A part is Mamba-2, attention, a feed-forward
part, or Mamba-2 beside attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.layer import FusedAttentionBackend
from engine.cache.state_layers import LayerStates
from engine.models.families.mamba import MambaConfig
from engine.models.feed_forward import FeedForward
from kernels.layers.activation import silu_gate
from kernels.layers.elementwise import concatenate, contiguous, scale
from kernels.layers.norm import rms_norm
from kernels.linear.fp32 import Product
from kernels.recurrent.convolution import causal_convolution
from kernels.recurrent.mamba2 import HeadConstants, mamba2_scan


class Step(NamedTuple):
    """Inputs that the parts of a forward pass share."""

    attend: FusedAttentionBackend
    angles: Sequence[Tensor]
    """The rotary tables at the tokens' positions, the same for all layers with attention."""
    states: LayerStates


class Part(Protocol):
    """The part of a block."""

    @property
    def products(self) -> tuple[Product, ...]: ...

    @property
    def is_recordable(self) -> bool:
        """True if it only launches kernels that a ``KernelGraph`` records, if its products do."""
        ...

    def project(self, x: Tensor, /) -> Tensor:
        """Return ``[tokens, any]`` for the normalised hidden states ``x``. No token depends on another."""
        ...

    def mix(self, rows: Tensor, step: Step, /) -> Tensor:
        """Return ``[tokens, any]`` for the result of ``project``, and write keys, values and states."""
        ...

    def finish(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """Return the result of ``mix`` as hidden states, plus ``residual``. No token depends on another."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """A part and the norm of its input."""

    norm: Tensor
    eps: float
    part: Part

    def project(self, hidden: Tensor) -> Tensor:
        """Return what ``Part.mix`` takes, for hidden states."""
        return self.part.project(rms_norm(hidden, self.norm, self.eps))


@dataclass(frozen=True, slots=True)
class FeedForwardPart:
    """A dense feed-forward part, or experts."""

    feed_forward: FeedForward

    @property
    def products(self) -> tuple[Product, ...]:
        return self.feed_forward.products

    @property
    def is_recordable(self) -> bool:
        return self.feed_forward.is_recordable

    def project(self, x: Tensor) -> Tensor:
        return x

    def mix(self, rows: Tensor, _: Step) -> Tensor:
        return rows

    def finish(self, mixed: Tensor, residual: Tensor) -> Tensor:
        return self.feed_forward.add(mixed, residual)


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Attention, the call with this index."""

    index: int
    head_dim: int
    factor: Tensor | None
    """``[1, 1]``, of its output."""
    qkv: Product
    output: Product
    is_recordable = True

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.output

    def project(self, x: Tensor) -> Tensor:
        return self.qkv(x)

    def mix(self, rows: Tensor, step: Step) -> Tensor:
        qkv = rows.view(len(rows), -1, self.head_dim)
        out = step.attend.forward_qkv(self.index, qkv, norm=None, eps=0.0, cos=step.angles[0], sin=step.angles[1])
        if self.factor is not None:
            scale(out, self.factor)
        return out

    def finish(self, mixed: Tensor, residual: Tensor) -> Tensor:
        return self.output.add(mixed, residual)


@dataclass(frozen=True, slots=True)
class MambaPart:
    """Mamba-2. ``projection`` makes gates, the channels of the convolution and step sizes of the input."""

    index: int
    """Index of its states among those of the model."""
    sizes: MambaConfig
    projection: Product
    factors: Tensor | None
    """``[1, rows of the projection]``, of its result."""
    filters: Tensor
    """``[width, channels]``."""
    filter_bias: Tensor | None
    """``[channels]``."""
    heads: HeadConstants
    norm: Tensor | None
    """``[groups, inner / groups]``."""
    output_factor: Tensor | None
    """``[1, 1]``, of its output."""
    output: Product
    is_recordable = True

    @property
    def products(self) -> tuple[Product, ...]:
        return self.projection, self.output

    def project(self, x: Tensor) -> Tensor:
        rows = self.projection(x)
        if self.factors is not None:
            scale(rows, self.factors)
        return rows

    def mix(self, rows: Tensor, step: Step) -> Tensor:
        sizes, tokens = self.sizes, len(rows)
        gates, channels, steps = torch.split(rows, [sizes.inner, sizes.channels, sizes.heads], dim=1)
        history, matrices = step.states.layers[self.index]
        segments = step.states.segments
        mixed = causal_convolution(channels, self.filters, history, segments, activate=True, bias=self.filter_bias)
        inputs, b, c = torch.split(mixed, sizes.projections[1:4], dim=1)
        out = mamba2_scan(
            inputs.view(tokens, sizes.heads, sizes.head_dim),
            b.view(tokens, sizes.groups, sizes.state_size),
            c.view(tokens, sizes.groups, sizes.state_size),
            steps,
            self.heads,
            matrices,
            segments,
            in_chunks=step.states.in_chunks,
        )
        gated = self._gate(out.flatten(1), gates)
        if self.output_factor is not None:
            scale(gated, self.output_factor)
        return gated

    def finish(self, mixed: Tensor, residual: Tensor) -> Tensor:
        return self.output.add(mixed, residual)

    def _gate(self, out: Tensor, gates: Tensor) -> Tensor:
        """Return ``silu(gates) * out``, and where there is a norm, normalised in groups before or after."""
        if self.sizes.norm_first:
            return silu_gate(gates, self._normalize(out))
        return self._normalize(silu_gate(gates, out))

    def _normalize(self, x: Tensor) -> Tensor:
        if self.norm is None:
            return x
        return rms_norm(x.view(len(x), *self.norm.shape), self.norm, self.sizes.norm_eps).flatten(1)


@dataclass(frozen=True, slots=True)
class ParallelPart:
    """Mamba-2 and attention, which read the same input (Falcon-H1)."""

    mamba: MambaPart
    attention: AttentionPart
    is_recordable = True

    @property
    def products(self) -> tuple[Product, ...]:
        return *self.mamba.products, *self.attention.products

    def project(self, x: Tensor) -> Tensor:
        return concatenate((self.mamba.project(x), self.attention.project(x)))

    def mix(self, rows: Tensor, step: Step) -> Tensor:
        width = sum(self.mamba.sizes.projections)
        mamba = self.mamba.mix(rows[:, :width], step)
        return concatenate((mamba, self.attention.mix(contiguous(rows[:, width:]), step)))

    def finish(self, mixed: Tensor, residual: Tensor) -> Tensor:
        inner = self.mamba.sizes.inner
        total = self.mamba.finish(contiguous(mixed[:, :inner]), residual)
        return self.attention.finish(contiguous(mixed[:, inner:]), total)
