"""Weights of a GGUF model, by the names of a Hugging Face checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from engine.gguf.config import read_architecture
from engine.gguf.fields.delta import ARCHITECTURES as DELTA_ARCHITECTURES
from engine.gguf.file import GgufModel, GgufTensor, read_gguf
from engine.gguf.rope import ROPE_TENSORS
from engine.gguf.tensor_names import TensorNames
from engine.protocol.types import EngineError
from engine.weights.matrices.blocks import BlockMatrix
from engine.weights.matrix import Matrix
from engine.weights.safetensors import Weights

_Kind = GGMLQuantizationType
_FLOATS = {_Kind.F32, _Kind.F16, _Kind.BF16}
_DTYPES = {_Kind.F16: torch.float16, _Kind.BF16: torch.bfloat16}
_BLOCKS = {
    *(_Kind.Q8_0, _Kind.Q4_0, _Kind.Q4_1, _Kind.Q5_0, _Kind.Q5_1),
    *(_Kind.Q2_K, _Kind.Q3_K, _Kind.Q4_K, _Kind.Q5_K, _Kind.Q6_K, _Kind.IQ4_NL, _Kind.IQ4_XS),
    *(_Kind.MXFP4, _Kind.NVFP4),
}
SUPPORTED = _FLOATS | _BLOCKS
_PERMUTED = dict.fromkeys(
    ("llama", "smollm3", "granite", "mistral3", "granitehybrid", "nemotron_h", "nemotron_h_moe"), ("attn_q", "attn_k")
)
"""Products whose rows llama.cpp reorders for its rotary embedding of neighbouring pairs, by architecture."""


class GgufWeights(Weights):
    """Tensors of a GGUF model; the Hugging Face names that are asked for are translated."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises ``EngineError`` for a file that cannot be read, or that has a block type which is not supported."""
        model = read_gguf(paths[0])
        self.parameters = 0
        self._folder = paths[0]
        architecture = read_architecture(model)
        heads = _read_most(model, "attention.head_count", 1)
        kv_heads = _read_most(model, "attention.head_count_kv", heads)
        self._names = TensorNames(
            architecture,
            _read_most(model, "block_count", 0),
            _read_most(model, "nextn_predict_layers", 0),
            has_experts=_read_most(model, "expert_count", 0) > 0,
        )
        self._files = {}
        self.has_tiled_values = architecture.startswith("qwen35")
        has_offset = architecture in ("gemma", "gemma2", "gemma3", *DELTA_ARCHITECTURES)
        for name, tensor in model.tensors.items():
            if tensor.kind not in SUPPORTED:
                raise EngineError(
                    f"{tensor.path}: {name!r} is {tensor.kind.name}; supported are "
                    f"{', '.join(sorted(kind.name for kind in SUPPORTED))}"
                )
            if name not in ROPE_TENSORS:
                part = name.split(".")[-2]
                is_permuted = part in _PERMUTED.get(architecture, ())
                source = _Source(
                    tensor,
                    heads=(heads if part == "attn_q" else kv_heads) if is_permuted else 0,
                    offset=-1.0 if has_offset and name.endswith("norm.weight") and part != "ssm_norm" else 0.0,
                )
                self._files[name] = tensor.path, source

    def block_formats(self) -> list[str]:
        """Return the names of the formats of all blocks that are left, without floats."""
        kinds = {source.tensor.kind for name, (_, source) in self._files.items() if not self._predicts(name)}
        return sorted(kind.name for kind in kinds & _BLOCKS)

    def has(self, name: str) -> bool:
        return self._names.find(name)[0] in self._files

    def take_matrix(self, name: str, rows: int, columns: int) -> Matrix:
        self.expect(f"{name}.weight", rows, columns)
        _, (source, expert) = self._locate(f"{name}.weight")
        if source.tensor.kind in _FLOATS:
            return self.take_floats(f"{name}.weight", rows, columns)
        self._forget(f"{name}.weight")
        self.count(rows * columns)
        blocks: BlockMatrix = source.matrix(expert)
        return blocks

    def take_floats(self, name: str, *shape: int) -> Tensor:
        """Take a tensor. Dimensions of 1 may be missing or too many, and vectors may be in groups."""
        _, (source, expert) = self._locate(name)
        stored = source.tensor.shape if expert is None else source.tensor.shape[1:]
        is_same = [size for size in stored if size > 1] == [size for size in shape if size > 1]
        if is_same or (len(shape) == 1 and math.prod(stored) == shape[0]):
            return super().take_floats(name, *stored).view(shape)
        return super().take_floats(name, *shape)

    def expect(self, name: str, *shape: int) -> None:
        path, (source, expert) = self._locate(name)
        actual = source.tensor.shape if expert is None else source.tensor.shape[1:]
        if actual != shape and shape != (1, *actual):
            raise EngineError(f"{path}: {name!r} has shape {actual}, its metadata says {shape}")

    def drop(self, name: str) -> None:
        self._files.pop(self._names.find(name)[0], None)

    def finish(self) -> None:
        """Raise ``EngineError`` if tensors are left over besides those of layers that predict several tokens."""
        for name in self.names():
            if self._predicts(name):
                del self._files[name]
        super().finish()

    def _predicts(self, name: str) -> bool:
        """Return True for the tensor of a layer that predicts several tokens, by its name in the file."""
        return name.startswith("blk.") and int(name.split(".")[1]) >= self._names.first_predicting

    def _take_tensor(self, name: str) -> tuple[Path, Tensor]:
        path, (source, expert) = self._locate(name)
        self._forget(name)
        return path, source.read_floats(expert)

    def _locate(self, name: str) -> tuple[Path, Any]:
        found, expert = self._names.find(name)
        path, source = super()._locate(found)
        if expert is not None and expert >= source.tensor.shape[0]:
            raise EngineError(f"{path} lacks the tensor {name!r}: {found} has {source.tensor.shape[0]} experts")
        return path, (source, expert)

    def _forget(self, name: str) -> None:
        """Remove a tensor, or one with all experts when the last of them is taken."""
        found, expert = self._names.find(name)
        source = self._files[found][1]
        if expert is not None:
            source.taken.add(expert)
        if expert is None or len(source.taken) == source.tensor.shape[0]:
            del self._files[found]


def _read_most(model: GgufModel, name: str, default: int) -> int:
    """Return the largest of the numbers of a field, which may have one for each layer."""
    return int(np.max(model.metadata.get(f"{model.metadata['general.architecture']}.{name}", default)))


@dataclass(slots=True)
class _Source:
    """A tensor, and what llama.cpp's conversion did to it."""

    tensor: GgufTensor
    heads: int
    """Heads whose rows are reordered; 0: none are."""
    offset: float
    """Number to add to every weight."""
    taken: set[int] = field(default_factory=set)
    """Experts that were taken."""

    def matrix(self, expert: int | None) -> BlockMatrix:
        """Return the blocks where they lie in the file, in the checkpoint's order of rows."""
        *experts, rows = self.tensor.shape[:-1] or (1,)
        blocks = torch.frombuffer(self.tensor.data, dtype=torch.uint8).view(*experts, rows, -1)
        chosen = blocks if expert is None else blocks[expert]
        if not self.heads:
            return BlockMatrix(self.tensor.kind, chosen)
        # Rows ``[heads, dim / 2, 2]`` back to ``[heads, 2, dim / 2]``.
        order = torch.arange(rows).view(self.heads, -1, 2).transpose(1, 2).flatten()
        return BlockMatrix(self.tensor.kind, chosen, order)

    def read_floats(self, expert: int | None) -> Tensor:
        """Return the weights, in 16 bits if the file has them so and nothing is added to them."""
        matrix = self.matrix(expert)
        dtype = None if self.offset else _DTYPES.get(self.tensor.kind)
        floats = matrix.dense() + self.offset if dtype is None else matrix.rows().view(dtype)
        return floats if len(self.tensor.shape) > 1 else floats[0]
