"""Write the files of a quantised checkpoint, one part at a time."""

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
    """Writes into a temporary folder beside ``out``, which is renamed to ``out`` if the block ends without an error."""

    def __init__(self, source: Path, out: Path, parts: int) -> None:
        """``parts``: number of files. Raises ``EngineError`` if ``out`` exists."""
        if out.exists():
            raise EngineError(f"{out} exists already; name a new folder")
        self._source, self._out, self._num_parts = source, out, parts
        self._temporary = out.with_name(f".{out.name}.partial")
        self._weight_map: dict[str, str] = {}
        self._num_bytes = 0
        self._num_written = 0

    def __enter__(self) -> Self:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._temporary.rename(self._out)
        else:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def write(self, tensors: dict[str, Tensor]) -> None:
        self._num_written += 1
        name = f"model-{self._num_written:05d}-of-{self._num_parts:05d}.safetensors"
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()}, self._temporary / name, {"format": "pt"}
        )
        self._weight_map |= dict.fromkeys(tensors, name)
        self._num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def finish(self, fields: dict[str, Any]) -> None:
        """Write the index and ``config.json`` with ``fields``, and copy the source's other files."""
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": self._weight_map}
        (self._temporary / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for path in sorted(self._source.iterdir()):
            if path.is_file() and path.suffix != ".safetensors" and path.name not in (_INDEX, "README.md"):
                shutil.copyfile(path, self._temporary / path.name)
        (self._temporary / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
