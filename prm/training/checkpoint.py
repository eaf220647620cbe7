"""State of a training run in one file: weights, AdamW's moments, and the run's settings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from prm.records import BadRecord


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    step: int,
    seconds: float,
) -> None:
    """Write the state to a temporary file, then rename it over the old one."""
    tensors = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in moments.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    notes = {"settings": json.dumps(settings), "step": str(step), "seconds": repr(seconds)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new, notes)
    os.replace(new, path)


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> tuple[int, float]:
    """Load the state if there is one; return the step and the seconds so far.

    Raises ``BadRecord`` for the state of a run with other settings.
    """
    if not path.exists():
        return 0, 0.0
    with safe_open(path, framework="pt") as file:
        notes = file.metadata()
        written = json.loads(notes["settings"])
        for name, value in settings.items():
            if written.get(name) != value:
                raise BadRecord(
                    f"{path} is of a run with {name} {written.get(name)!r}, and {value!r} is requested: use the same, "
                    "or remove the file to begin anew"
                )
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(file.get_tensor(f"model.{name}"))
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name in file.keys():  # noqa: SIM118
            kind, _, rest = name.partition(".")
            if kind == "optimizer":
                index, _, moment = rest.partition(".")
                state.setdefault(int(index), {})[moment] = file.get_tensor(name)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return int(notes["step"]), float(notes["seconds"])
