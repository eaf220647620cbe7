"""Reading a checkpoint's tensors. Safetensors only: a pickle could run code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.types import EngineError


class Weights:
    """The tensors of a checkpoint by name, as float32, each to be taken exactly once.

    ``finish`` refuses a checkpoint with tensors that nobody took: they mean a feature that the model does not compute.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        for path in _files(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                        self._tensors[name] = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise EngineError(f"{path} is not a readable safetensors file: {error}") from None

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor ``name`` in float32. Raises ``EngineError`` when it is missing or has another shape or kind."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise EngineError(f"{self._folder} lacks the tensor {name!r} that its config.json asks for")
        if tuple(tensor.shape) != shape:
            raise EngineError(f"{self._folder}: {name!r} has shape {tuple(tensor.shape)}, its config.json says {shape}")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise EngineError(f"{self._folder}: {name!r} is {tensor.dtype}; supported are float32, float16, bfloat16")
        return tensor.to(torch.float32)

    def drop(self, name: str) -> None:
        """Ignores a tensor that a checkpoint may carry without need."""
        self._tensors.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether the tensor is there and was not taken."""
        return name in self._tensors

    def finish(self) -> None:
        """Raises ``EngineError`` when tensors are left over."""
        if self._tensors:
            names = ", ".join(sorted(self._tensors)[:4])
            raise EngineError(f"{self._folder} has tensors that its architecture does not use: {names}")


def _files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise EngineError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json; only safetensors are loaded"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise EngineError(f"{index} is not a safetensors index: {error!r}") from None
    if any(Path(name).name != name for name in names):
        raise EngineError(f"{index} names files outside the folder")
    return [folder / name for name in names]
