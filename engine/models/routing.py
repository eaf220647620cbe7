"""Routing of tokens to experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.cpu.availability import can_use_kernels
from kernels.cpu.layers.experts import choose_experts
from kernels.linear.fp32 import Product

_LEAST_SUM = 1e-20
"""Least sum of weights to divide by. Sigmoids of a token may all be 0, a softmax never is."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """The choice of a token's experts and of their weights."""

    per_token: int
    """Experts that each token is routed to."""
    is_normalized: bool
    """Scale the weights of a token's experts to sum to 1."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits that the experts' weights are."""
    num_groups: int = 1
    """Groups of experts of the same size, consecutive ones."""
    groups_per_token: int = 1
    """Groups from which a token's experts are chosen (DeepSeek-V2, https://arxiv.org/abs/2405.04434)."""
    scale: float = 1.0
    """Factor of the weights."""


class Router:
    """Chooses each token's experts."""

    def __init__(self, config: RoutingConfig, product: Product, correction: Tensor | None = None) -> None:
        """``product``: ``[experts, hidden]``. ``correction``: ``[experts]``, added to the scores for the choice alone
        (DeepSeek-V3, https://arxiv.org/abs/2412.19437)."""
        self.config = config
        self.is_recordable = product.is_kernel
        """True if it only launches kernels that a ``KernelGraph`` records."""
        self._product = product
        self._correction = correction

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, float32, and the indices of each token's experts, ``[tokens, per_token]`` each."""
        config = self.config
        # Rounded to 16 bits, the scores of many experts would be equal.
        logits = self._product(x) if x.dtype.itemsize >= 4 else self._product.to_float32(x)
        correction = self._correction
        if can_use_kernels(logits) and (correction is None or can_use_kernels(correction)):
            return choose_experts(
                logits,
                correction,
                per_token=config.per_token,
                is_softmax=config.score == "softmax",
                is_normalized=config.is_normalized,
                num_groups=config.num_groups,
                groups_per_token=config.groups_per_token,
                scale=config.scale,
                least_sum=_LEAST_SUM,
            )
        scores = torch.softmax(logits, dim=-1) if config.score == "softmax" else torch.sigmoid(logits)
        ranked = scores if self._correction is None else scores + self._correction
        if config.num_groups > config.groups_per_token:
            ranked = self._hide_groups(ranked)
        if ranked is scores:
            weights, chosen = scores.topk(config.per_token, dim=-1)
        else:
            chosen = ranked.topk(config.per_token, dim=-1).indices
            weights = scores.gather(1, chosen)
        if config.is_normalized:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total + _LEAST_SUM if config.score == "sigmoid" else total)
        return (weights if config.scale == 1 else weights * config.scale), chosen

    def _hide_groups(self, ranked: Tensor) -> Tensor:
        """Return the scores with minus infinity for the experts of groups that a token's experts are not chosen from.

        A group counts as its best expert, or, with a correction, as the sum of its best two.
        """
        groups = ranked.view(len(ranked), self.config.num_groups, -1)
        num_best = 1 if self._correction is None else 2
        of_groups = groups.topk(num_best, dim=-1).values.sum(dim=-1)
        best = of_groups.topk(self.config.groups_per_token, dim=-1).indices
        is_hidden = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(is_hidden[:, :, None], -torch.inf).flatten(1)
