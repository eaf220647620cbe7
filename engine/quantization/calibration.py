"""Observe the inputs of a model's layers on calibration texts, with one layer in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.cpu_torch import normalize_and_rotate
from engine.attention.layer import LayerAttentionConfig
from engine.models.decoder import LayerBuilder
from engine.models.dense_attention import attend_densely
from engine.models.families.config import DecoderConfig
from engine.protocol.types import EngineError
from engine.text.json_lines import ENCODING, read_json_lines
from engine.text.tokenizer import Tokenizer
from engine.weights.formats.registry import MatrixReader
from engine.weights.matrix import dense
from engine.weights.safetensors import Weights
from kernels.common.quantization import Rows
from kernels.linear.fp32 import Linear

_MAX_TOKENS = 512
_MAX_SEQUENCES = 128
_MIN_TOKENS = 2048
"""Total number of tokens below which even small layers have more columns than inputs."""


def calibration_sequences(path: Path, folder: Path, config: DecoderConfig) -> list[Tensor]:
    """Return token ids of at most 128 sequences of at most 512. Raises ``EngineError`` if the file has too few."""
    length = min(_MAX_TOKENS, config.max_context)
    tokenizer = Tokenizer(folder, config.vocab_size)
    sequences: list[Tensor] = []
    for text in _read_texts(path):
        tokens = torch.tensor(tokenizer.encode(text), dtype=torch.int64)
        sequences += [piece for piece in torch.split(tokens, length) if len(piece)]
        if len(sequences) >= _MAX_SEQUENCES:
            break
    sequences = sequences[:_MAX_SEQUENCES]
    if (count := sum(map(len, sequences))) < _MIN_TOKENS:
        raise EngineError(f"{path} has {count} tokens; calibration needs {_MIN_TOKENS} or more")
    return sequences


class Observed:
    """A ``Product`` that accumulates statistics of its inputs, and whose matrices can be replaced."""

    quantization = None

    def __init__(self, matrices: dict[str, Tensor], bias: Tensor | None) -> None:
        columns = next(iter(matrices.values())).shape[1]
        self.matrices = matrices
        """The fused matrices, by their names in the checkpoint."""
        self.gram = torch.zeros(columns, columns)
        """Sum of ``x xᵀ`` over the inputs."""
        self.input_sums = torch.zeros(columns)
        """Sum of ``|x|`` over the inputs."""
        self.num_inputs = 0
        self.is_observing = True
        self.is_kernel = False
        self._bias = bias
        self._linear = self._fuse()

    @property
    def parameters(self) -> int:
        return self._linear.parameters

    def replace(self, matrices: dict[str, Tensor]) -> None:
        """Compute with other matrices from now on, and stop observing."""
        self.matrices, self.is_observing = matrices, False
        self._linear = self._fuse()

    def __call__(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        if self.is_observing:
            self.gram.addmm_(x.T, x)
            self.input_sums += x.abs().sum(0)
            self.num_inputs += len(x)
        return self._linear(x)

    def to_float32(self, x: Tensor) -> Tensor:
        return self(x).float()

    def add(self, x: Rows, residual: Tensor) -> Tensor:
        return self(x) + residual

    def _fuse(self) -> Linear:
        return Linear(torch.cat(list(self.matrices.values())), self._bias)


class ObservedBuilder(LayerBuilder):
    """Builds layers whose products are ``Observed``, and collects these in ``products``."""

    def __init__(self, config: DecoderConfig, weights: Weights, read: MatrixReader) -> None:
        super().__init__(config, weights, read)
        self.products: list[Observed] = []

    def product(self, parts: dict[str, int], columns: int, *, bias: bool) -> Observed:
        matrices = {name: dense(self._read(self._weights, name, rows, columns)) for name, rows in parts.items()}
        biases = [self._weights.take(f"{name}.bias", rows) for name, rows in parts.items()] if bias else []
        self.products.append(Observed(matrices, torch.cat(biases) if biases else None))
        return self.products[-1]


class DenseAttention:
    """A ``FusedAttentionBackend`` for one whole sequence, without a cache."""

    def __init__(self, layers: Sequence[LayerAttentionConfig]) -> None:
        self._layers = layers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_densely(self._layers[layer], q, k, v)

    def forward_qkv(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        return self(layer, *normalize_and_rotate(self._layers[layer], qkv, norm=norm, eps=eps, cos=cos, sin=sin))


def _read_texts(path: Path) -> list[str]:
    try:
        if path.suffix != ".jsonl":
            return [path.read_text(encoding=ENCODING)]
        return [str(json.loads(line)["text"]) for _, line in read_json_lines(path)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{path} is no calibration file (text, or .jsonl with 'text'): {error!r}") from None
