"""The feed-forward parts of a decoder layer: dense, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.linear.fp32 import Product

Activation = Callable[[Tensor], Tensor]


class GatedMlp:
    """``down(activation(gate(x)) * up(x))``, gate and up as one product."""

    def __init__(self, gate_up: Product, down: Product, activation: Activation) -> None:
        """``gate_up``: ``[2 * intermediate, hidden]``, ``down``: ``[hidden, intermediate]``."""
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    @property
    def products(self) -> tuple[Product, Product]:
        """Both of its products."""
        return self._gate_up, self._down

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[tokens, hidden]``. Returns the same shape."""
        return self._down(self._activation(self._gate_up(x)))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``."""
        return self._down.add(self._activation(self._gate_up(x)), residual)


class Experts:
    """Each token goes through its ``chosen`` best experts, weighted by the router's softmax over all experts.

    Tokens are sorted by expert, so that a step costs one product per expert that any token chose.
    """

    def __init__(self, router: Product, experts: Sequence[GatedMlp], chosen: int, *, normalised: bool) -> None:
        """``router``: ``[experts, hidden]``. ``normalised``: the weights of the chosen are made to sum to 1."""
        self._router = router
        self._experts = experts
        self._chosen = chosen
        self._normalised = normalised

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[tokens, hidden]``. Returns the same shape."""
        weights, chosen = torch.softmax(self._router(x), dim=-1).topk(self._chosen, dim=-1)
        if self._normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        chosen = chosen.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self._experts)).tolist()
        rows = torch.split(x[order // self._chosen], counts)
        mixed = torch.cat([expert(own) for expert, own in zip(self._experts, rows, strict=True) if len(own)])
        answers = torch.empty_like(mixed)
        answers[order] = mixed
        return (weights[:, None] @ answers.view(len(x), self._chosen, -1)).squeeze(1)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``."""
        return residual + self(x)
