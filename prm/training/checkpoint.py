"""State of a training run in one file: weights, AdamW's moments, and the run's settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
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
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    torch.save(state | {"settings": dict(settings), "step": step, "seconds": seconds}, new)
    os.replace(new, path)


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> tuple[int, float]:
    """Load the state if there is one; return the step and the seconds so far.

    Raises ``BadRecord`` for the state of a run with other settings.
    """
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, map_location="cpu", weights_only=True)  # no pickled code
    for name, value in settings.items():
        if state["settings"].get(name) != value:
            raise BadRecord(
                f"{path} is of a run with {name} {state['settings'].get(name)!r}, and {value!r} is requested: use the "
                "same, or remove the file to begin anew"
            )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["seconds"]
