"""Feed-forward parts of a decoder layer: dense, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.linear.fp32 import Product

Activation = Callable[[Tensor], Tensor]


class GatedMlp:
    """``down(activation(gate(x)) * up(x))``, with gate and up fused into one product."""

    def __init__(self, gate_up: Product, down: Product, activation: Activation) -> None:
        """``gate_up``: ``[2 * intermediate, hidden]``, ``down``: ``[hidden, intermediate]``."""
        self.products = gate_up, down
        self._gate_up, self._down, self._activation = gate_up, down, activation

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activation(self._gate_up(x)))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._down.add(self._activation(self._gate_up(x)), residual)


class Experts:
    """Route each token to its best experts, weighted by the router's softmax over all experts.

    Tokens are sorted by expert, so that a step costs one product per expert that any token is routed to.
    """

    def __init__(self, router: Product, experts: Sequence[GatedMlp], per_token: int, *, is_normalized: bool) -> None:
        """``router``: ``[experts, hidden]``. ``is_normalized``: scale a token's weights to sum to 1."""
        self.products = tuple(product for expert in experts for product in expert.products)
        self._router = router
        self._experts = experts
        self._per_token = per_token
        self._is_normalized = is_normalized

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self._router(x), dim=-1).topk(self._per_token, dim=-1)
        if self._is_normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        chosen = chosen.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self._experts)).tolist()
        rows = torch.split(x[order // self._per_token], counts)
        sorted_outputs = torch.cat([expert(own) for expert, own in zip(self._experts, rows, strict=True) if len(own)])
        outputs = torch.empty_like(sorted_outputs)
        outputs[order] = sorted_outputs
        return (weights[:, None] @ outputs.view(len(x), self._per_token, -1)).squeeze(1)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self(x)
