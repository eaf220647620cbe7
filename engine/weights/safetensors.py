"""Read a checkpoint's tensors. Safetensors only: a pickle could run code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.protocol.types import EngineError
from engine.weights.matrix import Matrix

_COMPARED_ROWS = 4096
"""Rows compared at once: two matrices of gigabytes are not held for it."""
_LANGUAGE_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
}
"""Beginnings of names of a language model's tensors in a multimodal checkpoint, and those of the model alone."""
_LANGUAGE_NAMES = "model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "mtp."
"""Beginnings of such names in checkpoints that keep only the other parts apart."""
_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Weights:
    """Tensors of a checkpoint by name, each to be taken exactly once.

    Files are mapped, and a tensor is read when it is taken, so that a tensor that the model converts is held once.
    ``finish`` refuses a checkpoint with tensors left over: they mean a feature that the model does not compute.
    """

    has_tiled_values = False
    """True if value heads of a delta rule that share a key head are ``key_heads`` apart, not beside each other."""

    def __init__(self, folder: Path, *, is_wrapped: bool = False) -> None:
        """Open the files. Raises ``EngineError`` naming the file if one is missing or damaged.

        ``is_wrapped``: the language model is a part of a larger one; its tensors alone are here, named as without it.
        """
        self.parameters = 0
        """Number of weights in all tensors taken so far."""
        self._folder = folder
        self._files: dict[str, tuple[Path, Any]] = {}
        self._stored_names: dict[str, str] = {}
        """Names in the files, of tensors that have another one here."""
        self._renamed: dict[str, str] = {}
        """Beginnings of names here, and those that ``rename`` has replaced."""
        for path, expected in _list_files(folder):
            try:
                file: Any = safe_open(path, framework="pt")
                names = set(file.keys())
            except FileNotFoundError:
                raise EngineError(f"{path} is missing, but model.safetensors.index.json lists it") from None
            except (OSError, SafetensorError) as error:
                raise EngineError(f"{path} is not a readable safetensors file: {error}") from None
            if missing := expected - names:
                raise EngineError(f"{path} lacks {min(missing)!r}, which model.safetensors.index.json says it has")
            self._files |= dict.fromkeys(names, (path, file))
        if is_wrapped:
            self._unwrap()

    def _unwrap(self) -> None:
        """Keep the tensors of the language model alone. Raises ``EngineError`` if there are none."""
        inner = {name: renamed for name in self._files if (renamed := inner_name(name)) is not None}
        if not any(name.startswith("model.layers.") for name in inner.values()):
            layers = [prefix for prefix, renamed in _LANGUAGE_PREFIXES.items() if renamed == "model."]
            raise EngineError(
                f"{self._folder} has no tensors of a language model, which are named "
                f"{' or '.join(f'{prefix}layers…' for prefix in layers)} in a multimodal checkpoint"
            )
        self._files = {renamed: self._files[name] for name, renamed in inner.items()}
        self._stored_names = {renamed: name for name, renamed in inner.items()}

    def rename(self, beginnings: Mapping[str, str]) -> None:
        """Give the tensors whose names begin so other beginnings. The first that fits counts."""
        self._renamed = {new: old for old, new in beginnings.items()}
        for name in self.names():
            old = next((old for old in beginnings if name.startswith(old)), None)
            if old is not None:
                renamed = beginnings[old] + name.removeprefix(old)
                self._files[renamed] = self._files.pop(name)
                self._stored_names[renamed] = self._stored_name(name)

    def take(self, name: str, *shape: int) -> Tensor:
        """Take a tensor in float32. Raises ``EngineError`` if it is missing or has another shape, or is no float."""
        return self.take_floats(name, *shape).float()

    def take_floats(self, name: str, *shape: int) -> Tensor:
        """Take a tensor as ``take`` does, in its own dtype: float32, float16 or bfloat16."""
        self.expect(name, *shape)
        path, tensor = self._take_tensor(name)
        if tensor.dtype not in _FLOAT_DTYPES:
            raise EngineError(f"{path}: {name!r} is {tensor.dtype}; supported are float32, float16, bfloat16")
        self.count(tensor.numel())
        return tensor

    def take_matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """Take the matrix ``NAME.weight`` as it is held. Raises ``EngineError`` if it has another shape."""
        return self.take_floats(f"{name}.weight", rows, columns)

    def expect(self, name: str, *shape: int) -> None:
        """Raise ``EngineError`` if a tensor is missing or has another shape, without reading it."""
        actual = self.get_shape(name)
        if actual != shape:
            raise EngineError(f"{self._locate(name)[0]}: {name!r} has shape {actual}, its config.json says {shape}")

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it. Raises ``EngineError`` if it is missing."""
        return tuple(self._locate(name)[1].get_slice(self._stored_name(name)).get_shape())

    def take_raw(self, name: str, dtype: torch.dtype | None, *shape: int) -> Tensor:
        """Take a tensor as it is, without counting it. ``dtype`` ``None`` allows any dtype, no ``shape`` any shape."""
        path, tensor = self._take_tensor(name)
        if shape and tuple(tensor.shape) != shape:
            raise EngineError(
                f"{path}: {name!r} has shape {tuple(tensor.shape)}, its config.json and quantization_config say {shape}"
            )
        if dtype is not None and tensor.dtype != dtype:
            raise EngineError(f"{path}: {name!r} is {tensor.dtype}, its quantization_config says {dtype}")
        return tensor

    def count(self, num_weights: int) -> None:
        self.parameters += num_weights

    def are_equal(self, name: str, other: str) -> bool:
        """Return True if two tensors, not taken yet, have the same shape and numbers."""
        one, two = (
            file.get_slice(self._stored_name(tensor))
            for tensor, (_, file) in ((name, self._locate(name)), (other, self._locate(other)))
        )
        if one.get_shape() != two.get_shape():
            return False
        rows = one.get_shape()[0]
        return all(
            torch.equal(one[start : start + _COMPARED_ROWS].float(), two[start : start + _COMPARED_ROWS].float())
            for start in range(0, rows, _COMPARED_ROWS)
        )

    def drop(self, name: str) -> None:
        """Ignore a tensor that the checkpoint may have."""
        self._files.pop(name, None)

    def drop_all(self, beginning: str) -> None:
        """Ignore the tensors whose names begin so."""
        for name in self.names():
            if name.startswith(beginning):
                self.drop(name)

    def has(self, name: str) -> bool:
        """Return True if the tensor exists and was not taken."""
        return name in self._files

    def _take_tensor(self, name: str) -> tuple[Path, Tensor]:
        path, file = self._locate(name)
        del self._files[name]
        try:
            return path, file.get_tensor(self._stored_name(name))
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{path}: {name!r} cannot be read: {error}") from None

    def names(self) -> list[str]:
        """Return the names of the tensors not taken yet, sorted."""
        return sorted(self._files)

    def _locate(self, name: str) -> tuple[Path, Any]:
        if name not in self._files:
            new = next((new for new in self._renamed if name.startswith(new)), "")
            stored = self._renamed.get(new, "") + name.removeprefix(new)
            raise EngineError(f"{self._folder} lacks the tensor {stored!r}, which its config.json requires")
        return self._files[name]

    def _stored_name(self, name: str) -> str:
        return self._stored_names.get(name, name)

    def finish(self) -> None:
        """Raise ``EngineError`` if tensors are left over."""
        # Old checkpoints hold the rotary frequencies, which follow from the config.
        unused = sorted(name for name in self._files if not name.endswith(".rotary_emb.inv_freq"))
        if unused:
            path, stored = self._files[unused[0]][0], ", ".join(map(self._stored_name, unused[:4]))
            raise EngineError(f"{path} has tensors that its architecture does not use: {stored}")


def inner_name(name: str) -> str | None:
    """Return the name that a tensor of a multimodal checkpoint has in its language model; ``None`` for the others."""
    for prefix in _LANGUAGE_PREFIXES:
        if name.startswith(prefix):
            return _LANGUAGE_PREFIXES[prefix] + name.removeprefix(prefix)
    return name if name.startswith(_LANGUAGE_NAMES) else None


def _list_files(folder: Path) -> list[tuple[Path, set[str]]]:
    """Return the checkpoint's files and the tensors that each must have."""
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
