"""LoRA modules for training: frozen linear layers with a low-rank update, and an adapter's folder in PEFT's format.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, section 4.1: ``A`` begins with random numbers and
``B`` with zeros, so that training begins at the base. An activated adapter's update counts in marked rows alone.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from prm.records import BadRecord

MODULES = "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"
"""Modules that are trained, by the ends of their names. An adapter that is active in few tokens needs them all."""


class ActiveRows:
    """The rows ``[batch, tokens, 1]`` in which updates count; ``None`` for all."""

    mask: Tensor | None = None


class LoraLinear(nn.Module):
    """A frozen linear layer with an update of rank ``r`` times ``alpha / r``."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, rows: ActiveRows) -> None:
        super().__init__()
        self.base, self._scale, self._rows = base, alpha / rank, rows
        device = base.weight.device
        self.down = nn.Parameter(torch.empty(rank, base.in_features, device=device))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        update = F.linear(F.linear(x, self.down), self.up) * self._scale
        out: Tensor = self.base(x)
        return out + (update if self._rows.mask is None else update * self._rows.mask)


def attach(model: nn.Module, rank: int, alpha: float) -> tuple[nn.ModuleDict, ActiveRows]:
    """Freeze a model and replace the linear ``MODULES`` of its decoder layers, experts left out.

    Returns the new modules by their names, with ``/`` for dots. Raises ``BadRecord`` if there are none.
    """
    model.requires_grad_(False)
    rows = ActiveRows()
    chosen = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith("model.layers.")
        and ".experts." not in name
        and name.endswith(tuple(f".{one}" for one in MODULES))
    }
    if not chosen:
        raise BadRecord(f"the base has none of the modules {', '.join(MODULES)}: it cannot be adapted here")
    modules = nn.ModuleDict()
    for name, module in chosen.items():
        parent, _, last = name.rpartition(".")
        modules[name.replace(".", "/")] = adapted = LoraLinear(module, rank, alpha, rows)
        setattr(model.get_submodule(parent), last, adapted)
    return modules, rows


def list_parameters(modules: nn.ModuleDict) -> nn.ParameterDict:
    """Return the trained parameters, without the frozen layers."""
    return nn.ParameterDict(
        {
            f"{name}/{kind}": getattr(module, part)
            for name, module in modules.items()
            for kind, part in (("lora_A", "down"), ("lora_B", "up"))
        }
    )


def save_adapter(folder: Path, parameters: nn.ParameterDict, settings: dict[str, Any]) -> None:
    """Write a new folder in PEFT's format. ``settings``: the fields of ``LoraConfig`` that differ from the defaults."""
    tensors = {
        f"base_model.model.{name.replace('/', '.')}.weight": tensor.detach().cpu().contiguous()
        for name, tensor in parameters.items()
    }
    targets = sorted({name.split("/")[-2] for name in parameters})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "target_modules": targets,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config | settings, indent=2) + "\n")
