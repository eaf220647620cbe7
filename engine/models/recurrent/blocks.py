"""The blocks of which the layers of models with Mamba-2 consist.

A block adds to the hidden states what its part makes of their norm. A part is Mamba-2, attention, a feed-forward
part, or Mamba-2 beside attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.layer import FusedAttentionBackend
from engine.models.families.mamba import MambaConfig
from engine.models.feed_forward import FeedForward
from kernels.layers.activation import silu_mul
from kernels.layers.norm import rms_norm
from kernels.linear.fp32 import Product
from kernels.recurrent.convolution import causal_convolution
from kernels.recurrent.mamba2 import HeadConstants, mamba2_scan


class Step(NamedTuple):
    """Inputs that the parts of a forward pass share."""

    attend: FusedAttentionBackend
    angles: Sequence[Tensor]
    """The rotary tables at the tokens' positions, the same for all layers with attention."""
    states: Iterator[Sequence[Tensor]]
    """The states of each layer that has one, in their order."""
    segments: Tensor
    """``[segments, 4]``, see ``causal_convolution``."""


class Part(Protocol):
    """The part of a block."""

    @property
    def products(self) -> tuple[Product, ...]: ...

    def add(self, x: Tensor, residual: Tensor, step: Step, /) -> Tensor:
        """Return its result for the normalised hidden states ``x``, plus ``residual``."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """A part and the norm of its input."""

    norm: Tensor
    eps: float
    part: Part

    def add(self, hidden: Tensor, step: Step) -> Tensor:
        """Return the hidden states after the block."""
        return self.part.add(rms_norm(hidden, self.norm, self.eps), hidden, step)


@dataclass(frozen=True, slots=True)
class FeedForwardPart:
    """A dense feed-forward part, or experts."""

    feed_forward: FeedForward

    @property
    def products(self) -> tuple[Product, ...]:
        return self.feed_forward.products

    def add(self, x: Tensor, residual: Tensor, _: Step) -> Tensor:
        return self.feed_forward.add(x, residual)


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Attention, the call with this index."""

    index: int
    head_dim: int
    factor: float
    """Factor of its output."""
    qkv: Product
    output: Product

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.output

    def add(self, x: Tensor, residual: Tensor, step: Step) -> Tensor:
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        out = step.attend.forward_qkv(self.index, qkv, None, 0.0, *step.angles)
        return self.output.add(out if self.factor == 1 else out * self.factor, residual)


@dataclass(frozen=True, slots=True)
class MambaPart:
    """Mamba-2. ``projection`` makes gates, the channels of the convolution and step sizes of the input."""

    sizes: MambaConfig
    projection: Product
    factors: Tensor | None
    """``[rows of the projection]``, of its result."""
    filters: Tensor
    """``[width, channels]``."""
    filter_bias: Tensor | None
    """``[channels]``."""
    heads: HeadConstants
    norm: Tensor | None
    """``[groups, inner / groups]``."""
    output: Product

    @property
    def products(self) -> tuple[Product, ...]:
        return self.projection, self.output

    def add(self, x: Tensor, residual: Tensor, step: Step) -> Tensor:
        sizes, tokens = self.sizes, len(x)
        rows = self.projection(x)
        if self.factors is not None:
            rows = rows * self.factors
        gates, channels, steps = torch.split(rows, [sizes.inner, sizes.channels, sizes.heads], dim=1)
        history, matrices = next(step.states)
        mixed = causal_convolution(
            channels.contiguous(), self.filters, history, step.segments, activate=True, bias=self.filter_bias
        )
        inputs, b, c = torch.split(mixed, sizes.projections[1:4], dim=1)
        out = mamba2_scan(
            inputs.reshape(tokens, sizes.heads, sizes.head_dim),
            b.reshape(tokens, sizes.groups, sizes.state_size),
            c.reshape(tokens, sizes.groups, sizes.state_size),
            steps,
            self.heads,
            matrices,
            step.segments,
        )
        gated = self._gate(out.flatten(1), gates)
        return self.output.add(gated if sizes.output_factor == 1 else gated * sizes.output_factor, residual)

    def _gate(self, out: Tensor, gates: Tensor) -> Tensor:
        """Return ``silu(gates) * out``, and where there is a norm, normalised in groups before or after."""
        if self.sizes.norm_first:
            out = self._normalize(out)
        gated = silu_mul(torch.cat((gates, out), dim=1))
        return gated if self.sizes.norm_first else self._normalize(gated)

    def _normalize(self, x: Tensor) -> Tensor:
        if self.norm is None:
            return x
        return rms_norm(x.view(len(x), *self.norm.shape), self.norm, self.sizes.norm_eps).flatten(1)


@dataclass(frozen=True, slots=True)
class ParallelPart:
    """Mamba-2 and attention, which read the same input (Falcon-H1)."""

    mamba: MambaPart
    attention: AttentionPart

    @property
    def products(self) -> tuple[Product, ...]:
        return *self.mamba.products, *self.attention.products

    def add(self, x: Tensor, residual: Tensor, step: Step) -> Tensor:
        return self.attention.add(x, self.mamba.add(x, residual, step), step)
