"""Reading a checkpoint's tensors. Safetensors only: a pickle could run code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.protocol.types import EngineError

_KINDS = (torch.float32, torch.float16, torch.bfloat16)


class Weights:
    """The tensors of a checkpoint by name, each to be taken exactly once.

    Files are mapped, and a tensor is read when it is taken: what the model converts or packs is held once. ``finish``
    refuses a checkpoint with tensors that nobody took: they mean a feature that the model does not compute.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ``EngineError`` that names the file when one is missing or damaged."""
        self.parameters = 0
        """Numbers in all tensors taken so far."""
        self._folder = folder
        self._files: dict[str, tuple[Path, Any]] = {}
        for path, expected in _files(folder):
            try:
                file: Any = safe_open(path, framework="pt")
                names = set(file.keys())
            except FileNotFoundError:
                raise EngineError(f"{path} is missing, but model.safetensors.index.json lists it") from None
            except (OSError, SafetensorError) as error:
                raise EngineError(f"{path} is not a readable safetensors file: {error}") from None
            if lacking := expected - names:
                raise EngineError(f"{path} lacks {min(lacking)!r}, which model.safetensors.index.json says it has")
            self._files |= dict.fromkeys(names, (path, file))

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor ``name`` in float32. Raises ``EngineError`` when it is missing or has another shape or kind."""
        path, tensor = self._take(name)
        if tuple(tensor.shape) != shape:
            raise EngineError(f"{path}: {name!r} has shape {tuple(tensor.shape)}, its config.json says {shape}")
        if tensor.dtype not in _KINDS:
            raise EngineError(f"{path}: {name!r} is {tensor.dtype}; supported are float32, float16, bfloat16")
        self.count(tensor.numel())
        return tensor.to(torch.float32)

    def expect(self, name: str, *shape: int) -> None:
        """Raises as ``take`` does when the tensor is missing or has another shape, without reading it."""
        path, file = self._where(name)
        found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            raise EngineError(f"{path}: {name!r} has shape {found}, its config.json says {shape}")

    def take_raw(self, name: str, kind: torch.dtype | None, *shape: int) -> Tensor:
        """A tensor of a quantised matrix as it is. Not counted. Without ``kind`` any, without ``shape`` any."""
        path, tensor = self._take(name)
        if shape and tuple(tensor.shape) != shape:
            raise EngineError(
                f"{path}: {name!r} has shape {tuple(tensor.shape)}, its config.json and quantization_config say {shape}"
            )
        if kind is not None and tensor.dtype != kind:
            raise EngineError(f"{path}: {name!r} is {tensor.dtype}, its quantization_config says {kind}")
        return tensor

    def count(self, numbers: int) -> None:
        """Adds to ``parameters``."""
        self.parameters += numbers

    def drop(self, name: str) -> None:
        """Ignores a tensor that a checkpoint may carry without need."""
        self._files.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether the tensor is there and was not taken."""
        return name in self._files

    def _take(self, name: str) -> tuple[Path, Tensor]:
        path, file = self._where(name)
        del self._files[name]
        try:
            return path, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{path}: {name!r} cannot be read: {error}") from None

    def names(self) -> list[str]:
        """The tensors that are there and were not taken, sorted."""
        return sorted(self._files)

    def _where(self, name: str) -> tuple[Path, Any]:
        if name not in self._files:
            raise EngineError(f"{self._folder} lacks the tensor {name!r} that its config.json asks for")
        return self._files[name]

    def finish(self) -> None:
        """Raises ``EngineError`` when tensors are left over."""
        # Old checkpoints carry the rotary frequencies, which the config gives too.
        left = sorted(name for name in self._files if not name.endswith(".rotary_emb.inv_freq"))
        if left:
            path = self._files[left[0]][0]
            raise EngineError(f"{path} has tensors that its architecture does not use: {', '.join(left[:4])}")


def _files(folder: Path) -> list[tuple[Path, set[str]]]:
    """The checkpoint's files and the tensors that each must have."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [(single, set())]
    if not index.exists():
        raise EngineError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json; only safetensors are loaded"
        )
    files: dict[str, set[str]] = {}
    try:
        for tensor, name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            files.setdefault(name, set()).add(tensor)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise EngineError(f"{index} is not a safetensors index: {error!r}") from None
    if any(Path(name).name != name for name in files):
        raise EngineError(f"{index} names files outside the folder")
    return [(folder / name, tensors) for name, tensors in sorted(files.items())]
