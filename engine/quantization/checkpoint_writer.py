"""The files of a quantised checkpoint, written a part at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import save_file
from torch import Tensor

from engine.protocol.types import EngineError

_INDEX = "model.safetensors.index.json"


class CheckpointWriter:
    """Files in a folder beside ``out``, which becomes ``out`` when the block ends without an error, and else goes."""

    def __init__(self, source: Path, out: Path, parts: int) -> None:
        """Raises ``EngineError`` when ``out`` is there already."""
        if out.exists():
            raise EngineError(f"{out} is there already; name a folder that is not")
        self._source, self._out, self._parts = source, out, parts
        self._partial = out.with_name(f".{out.name}.partial")
        self._map: dict[str, str] = {}
        self._bytes = 0
        self._written = 0

    def __enter__(self) -> Self:
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._partial.rename(self._out)
        else:
            shutil.rmtree(self._partial, ignore_errors=True)

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Writes the next part."""
        self._written += 1
        name = f"model-{self._written:05d}-of-{self._parts:05d}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, self._partial / name, {"format": "pt"})
        self._map |= dict.fromkeys(tensors, name)
        self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def finish(self, fields: dict[str, Any]) -> None:
        """Writes the index and ``config.json`` with ``fields``, and copies what else the source has."""
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._map}
        (self._partial / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for path in sorted(self._source.iterdir()):
            if path.is_file() and path.suffix != ".safetensors" and path.name not in (_INDEX, "README.md"):
                shutil.copyfile(path, self._partial / path.name)
        (self._partial / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
