"""A user's model, in the form that each system takes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from benchmarks.engine.checkpoint import kept
from benchmarks.engine.process import BenchError
from benchmarks.engine.workloads import VOCAB
from engine.gguf.config import config_fields
from engine.gguf.file import GgufModel, read_gguf
from engine.gguf.paths import is_gguf
from engine.protocol.types import EngineError

_LONGEST = 2048
"""Positions that the workloads need."""
_CONVERT_SECONDS = 1200.0


@dataclass(frozen=True, slots=True)
class UserModel:
    """A GGUF file or a checkpoint's folder, and the sizes that its figures are related to."""

    path: Path
    name: str
    bytes: int
    """Size of the weights' files."""
    bytes_per_token: float
    """Bytes of the weights that one token needs: of an embedding table one row, of experts those that are used."""

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"


def open_user_model(path: Path) -> UserModel:
    """Return the model at ``path``. Raises ``BenchError`` naming what is wrong with it."""
    if is_gguf(path):
        try:
            model = read_gguf(path)
            fields = config_fields(model)
        except EngineError as error:
            raise BenchError(str(error)) from None
        size = sum(file.stat().st_size for file in model.paths)
        found = UserModel(model.paths[0].absolute(), model.paths[0].stem, size, _bytes_per_token(model, fields))
    elif (path / "config.json").is_file():
        fields = json.loads((path / "config.json").read_text())
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        if not size:
            raise BenchError(f"{path} has no *.safetensors")
        found = UserModel(path.absolute(), path.absolute().name, size, size)
    else:
        raise BenchError(f"{path} is neither a GGUF file nor a folder with config.json or a GGUF file")
    for field, least in (("vocab_size", VOCAB.stop), ("max_position_embeddings", _LONGEST)):
        if fields.get(field, least) < least:
            raise BenchError(f"{path} has {field} {fields[field]}; the workloads need at least {least}")
    return found


def _bytes_per_token(model: GgufModel, fields: dict[str, object]) -> float:
    total = 0.0
    for name, tensor in model.tensors.items():
        if name == "token_embd.weight" and "output.weight" in model.tensors:
            continue
        share = float(fields["num_experts_per_tok"]) / float(fields["num_experts"]) if "_exps." in name else 1.0  # type: ignore[arg-type]
        total += len(tensor.data) * share
    return total


def dequantised(model: UserModel, cache: Path) -> Path:
    """Return a folder with the weights of a GGUF file in float32, kept under ``cache``. Raises ``BenchError``."""
    state = model.path.stat()
    digest = blake2b(f"{model.path} {state.st_size} {state.st_mtime_ns}".encode(), digest_size=8).hexdigest()
    try:
        return kept(f"{model.name}-{digest}-float32", cache, lambda folder: _convert(model.path, folder))
    except OSError as error:
        raise BenchError(f"{model.path} was not converted to float32: {error}") from None


def _convert(file: Path, folder: Path) -> None:
    """Convert in a process of its own, since this one has neither torch nor memory for the weights."""
    command = [sys.executable, "-m", "benchmarks.gguf.dequantise", str(file), str(folder)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_CONVERT_SECONDS, check=True)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{file} was not converted to float32 within {_CONVERT_SECONDS:.0f} seconds") from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        raise BenchError(f"{file} was not converted to float32: {reason}") from None
