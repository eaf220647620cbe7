"""What the layers of a model are given when it reads a text: one layer in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.layer import LayerAttentionConfig
from engine.attention.projections import normalize_and_rotate
from engine.models.decoder import LayerBuilder
from engine.models.families import DecoderConfig
from engine.protocol.types import EngineError
from engine.text.tokenizer import Tokenizer
from engine.weights.formats.registry import MatrixReader
from engine.weights.matrix import dense
from engine.weights.safetensors import Weights
from kernels.attention.reference import attention
from kernels.linear.fp32 import Linear

_LENGTH = 512
_SEQUENCES = 128
_LEAST = 2048
"""Tokens below which there are more columns than inputs even in small layers."""


def calibration_sequences(path: Path, folder: Path, config: DecoderConfig) -> list[Tensor]:
    """Token ids of at most 128 sequences of at most 512. Raises ``EngineError`` when the file has not enough."""
    length = min(_LENGTH, config.max_context)
    tokenizer = Tokenizer(folder, config.vocab_size)
    sequences: list[Tensor] = []
    for text in _texts(path):
        tokens = torch.tensor(tokenizer.encode(text), dtype=torch.int64)
        sequences += [piece for piece in torch.split(tokens, length) if len(piece)]
        if len(sequences) >= _SEQUENCES:
            break
    sequences = sequences[:_SEQUENCES]
    if (count := sum(map(len, sequences))) < _LEAST:
        raise EngineError(f"{path} has {count} tokens; calibration needs {_LEAST} or more")
    return sequences


class Observed:
    """A ``Product`` that remembers what it is given, and whose matrices can be replaced."""

    def __init__(self, matrices: dict[str, Tensor], bias: Tensor | None) -> None:
        columns = next(iter(matrices.values())).shape[1]
        self.matrices = matrices
        """The parts, one below the other, by their names in the checkpoint."""
        self.gram = torch.zeros(columns, columns)
        """Sum of ``x xᵀ``."""
        self.sizes = torch.zeros(columns)
        """Sum of ``|x|``."""
        self.rows = 0
        self.watching = True
        self.is_kernel = False
        """See ``Product``."""
        self._bias = bias
        self._linear = self._joined()

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return self._linear.parameters

    def replace(self, matrices: dict[str, Tensor]) -> None:
        """Computes with others from now on, and remembers nothing more."""
        self.matrices, self.watching = matrices, False
        self._linear = self._joined()

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[rows, in]``. Returns ``[rows, out]``."""
        if self.watching:
            self.gram.addmm_(x.T, x)
            self.sizes += x.abs().sum(0)
            self.rows += len(x)
        return self._linear(x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``."""
        return self(x) + residual

    def _joined(self) -> Linear:
        return Linear(torch.cat(list(self.matrices.values())), self._bias)


class ObservedBuilder(LayerBuilder):
    """Builds layers whose products are ``Observed``, and lists these."""

    def __init__(self, config: DecoderConfig, weights: Weights, read: MatrixReader) -> None:
        super().__init__(config, weights, read)
        self.products: list[Observed] = []

    def product(self, parts: dict[str, int], columns: int, *, bias: bool) -> Observed:
        """See ``LayerBuilder``."""
        matrices = {name: dense(self._read(self._weights, name, rows, columns)) for name, rows in parts.items()}
        biases = [self._weights.take(f"{name}.bias", rows) for name, rows in parts.items()] if bias else []
        self.products.append(Observed(matrices, torch.cat(biases) if biases else None))
        return self.products[-1]


class DenseAttend:
    """``FusedAttentionBackend`` for one whole sequence, without a cache."""

    def __init__(self, layers: Sequence[LayerAttentionConfig]) -> None:
        self._layers = layers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``AttentionBackend``."""
        about, tokens = self._layers[layer], len(q)
        ages = torch.arange(tokens)[:, None] - torch.arange(tokens)
        hidden = ages < 0 if about.window is None else (ages < 0) | (ages >= about.window)
        mask = torch.zeros(tokens, tokens).masked_fill_(hidden, -torch.inf)
        k, v = (one.repeat_interleave(about.heads // about.kv_heads, dim=1) for one in (k, v))
        q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
        mixed = attention(q, k, v, scale=about.scale, mask=mask, softcap=about.softcap)
        return mixed[0].transpose(0, 1).flatten(1)

    def forward_qkv(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """See ``FusedAttentionBackend``."""
        return self(layer, *normalize_and_rotate(self._layers[layer], qkv, norm, eps, cos, sin))


def _texts(path: Path) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            return [content]
        return [str(json.loads(line)["text"]) for line in content.splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{path} is no calibration file (text, or .jsonl of objects with text): {error!r}") from None
