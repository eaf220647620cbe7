"""Muon for the matrices of the layers, AdamW for everything else, each with one learning rate.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): momentum, then the nearest orthogonal matrix by
five Newton-Schulz steps. Matrices of equal shape are stacked and orthogonalised in one batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Optimizer:
    """Steps the given parameters; its state is a flat dict of tensors, ready for safetensors."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        muon_rate: float,
        adam_rate: float,
        decay: float = 0.01,
        momentum: float = 0.95,
    ) -> None:
        self.muon_rate, self.adam_rate, self.decay, self.momentum = muon_rate, adam_rate, decay, momentum
        self.groups: dict[torch.Size, list[nn.Parameter]] = {}
        self.buffers: dict[torch.Size, Tensor] = {}
        rest: list[nn.Parameter] = []
        for name, p in parameters:
            if p.ndim == 2 and name.startswith("layers."):
                self.groups.setdefault(p.shape, []).append(p)
            else:
                rest.append(p)
        for size, group in self.groups.items():
            self.buffers[size] = group[0].new_zeros(len(group), *size)
        self.adam = torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.rest = rest

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One step with both learning rates times ``scale``; clears the gradients."""
        for size, group in self.groups.items():
            gradients = torch.stack([p.grad if p.grad is not None else torch.zeros_like(p) for p in group])
            buffer = self.buffers[size]
            buffer.lerp_(gradients, 1 - self.momentum)
            updates = orthogonal(gradients.lerp(buffer, self.momentum))
            rate = scale * self.muon_rate
            for p, update in zip(group, updates, strict=True):
                p.mul_(1 - rate * self.decay).add_(update, alpha=-rate * max(1, size[0] / size[1]) ** 0.5)
                p.grad = None
        for entry in self.adam.param_groups:
            entry["lr"] = scale * self.adam_rate
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        found = {f"muon.{a}x{b}": self.buffers[size] for size in self.groups for a, b in [size]}
        for i, p in enumerate(self.rest):
            for key, value in self.adam.state[p].items():
                found[f"adam.{i}.{key}"] = value.reshape(1) if value.ndim == 0 else value
        return found

    def restore(self, state: dict[str, Tensor]) -> None:
        for size in self.groups:
            self.buffers[size].copy_(state[f"muon.{size[0]}x{size[1]}"])
        for i, p in enumerate(self.rest):
            entry = {key.rsplit(".", 1)[1]: value for key, value in state.items() if key.startswith(f"adam.{i}.")}
            self.adam.state[p] = {
                key: value.reshape(()).clone() if key == "step" else value.to(p.device, copy=True)
                for key, value in entry.items()
            }


def orthogonal(matrices: Tensor) -> Tensor:
    """Approximately the orthogonal factor of each matrix of a batch (count, rows, columns)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.transpose(1, 2) if tall else x
    return result
