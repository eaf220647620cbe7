"""``quantize``: a checkpoint in fewer bits, one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.config import RawConfig, read_raw_config
from engine.models.decoder import Layer, layer_forward, scaled_embedding
from engine.models.families import DecoderConfig, decoder_config, is_defined
from engine.protocol.types import EngineError
from engine.quantization.awq import awq_layer
from engine.quantization.calibration import DenseAttend, Observed, ObservedBuilder, calibration_sequences
from engine.quantization.checkpoint_writer import CheckpointWriter
from engine.quantization.gptq import gptq as gptq_rounded
from engine.quantization.options import Options, group
from engine.quantization.plan import check, is_router
from engine.quantization.rounding import int8_rows, symmetric
from engine.weights.formats import awq, bitsandbytes, compressed_tensors, fp8, gptq
from engine.weights.formats.registry import create_reader
from engine.weights.safetensors import Weights

Progress = Callable[[int, int, str], None]
"""Hears what is done, of how much, and what comes next."""


def quantize(folder: Path, out: Path, options: Options, progress: Progress) -> None:
    """Writes the checkpoint in ``folder`` to ``out`` in the public format of the method.

    Embeddings, norms, routers and the output projection stay as they are. ``rtn`` takes the output projection too where
    it has weights of its own, in 8 bits with 8-bit activations (W8A8): beside 4 bits for all others it would be most of
    what is read for a token. Raises ``EngineError``, before anything is computed, for what cannot be done.
    """
    raw = read_raw_config(folder)
    if not is_defined(raw.architecture):
        raise EngineError(f"{folder}: architecture {raw.architecture} is not supported for quantisation")
    if raw.fields.get("quantization_config"):
        raise EngineError(f"{folder} is quantised already")
    config = decoder_config(raw)
    check(config, folder, options)
    sequences = []
    if options.calibration is not None and options.calibrated:
        sequences = calibration_sequences(options.calibration, folder, config)
    with torch.inference_mode(), CheckpointWriter(folder, out, config.num_layers + 1) as writer:
        _Run(raw, config, options, progress, writer).run(sequences)


class _Run:
    def __init__(
        self, raw: RawConfig, config: DecoderConfig, options: Options, progress: Progress, writer: CheckpointWriter
    ) -> None:
        self._raw, self._config, self._options = raw, config, options
        self._progress, self._writer = progress, writer
        self._weights = Weights(raw.folder)
        self._untouched = Weights(raw.folder)
        """What is copied: each tensor is taken from one of the two."""
        self._tables = (
            {rope: rope.tables(config.max_context) for rope in set(config.ropes)} if options.calibrated else {}
        )

    def run(self, sequences: list[Tensor]) -> None:
        layers = self._config.num_layers
        hidden = self._embedded(sequences) if sequences else []
        for index in range(layers):
            self._progress(index, layers + 1, f"layer {index + 1} of {layers}")
            hidden = self._layer(index, hidden)
        self._progress(layers, layers + 1, "embeddings")
        head: dict[str, Tensor] = {}
        if self._quantizes_head:
            weight = self._weights.take("lm_head.weight", self._config.vocab_size, self._config.hidden_size)
            head = compressed_tensors.pack_matrix("lm_head", int8_rows(weight))
        self._writer.write(head | self._rest(self._untouched.names(), {"lm_head"} if head else set(), head))
        self._writer.finish(self._raw.fields | {"quantization_config": self._format()})
        self._progress(layers + 1, layers + 1, "done")

    @property
    def _quantizes_head(self) -> bool:
        config, options = self._config, self._options
        rows = options.group_size is None or options.bits == 4
        return options.method == "rtn" and rows and not config.tied and not config.num_labels

    def _format(self) -> dict[str, Any]:
        options = self._options
        left = [] if self._quantizes_head else list(self._config.head.matrices)
        if self._config.experts:
            left.append("re:.*gate$" if options.method == "rtn" else "gate")
        if options.method == "rtn":
            head = "lm_head" if self._quantizes_head else None
            return compressed_tensors.build_config(options.bits, options.group_size, left, w8a8_module=head)
        size = -1 if options.group_size is None else options.group_size
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "gptq": lambda: gptq.build_config(options.bits, size, act_order=True),
            "awq": lambda: awq.build_config(size, left),
            "fp8": lambda: fp8.build_config(left),
            "nf4": lambda: bitsandbytes.build_config(left),
        }
        return makers[options.method]()

    def _embedded(self, sequences: list[Tensor]) -> list[Tensor]:
        table = Weights(self._raw.folder).take(
            "model.embed_tokens.weight", self._config.vocab_size, self._config.hidden_size
        )
        return [scaled_embedding(self._config, table[tokens]) for tokens in sequences]

    def _layer(self, index: int, hidden: list[Tensor]) -> list[Tensor]:
        """Quantises and writes a layer. Takes and returns what calibration feeds to it, and to the next."""
        builder = ObservedBuilder(self._config, self._weights, create_reader(None))
        layer, prefix = builder.layer(index), f"model.layers.{index}."
        self._forward(index, layer, hidden)  # for what the products see
        if self._options.method == "awq":
            tensors = awq_layer(self._config, prefix, builder.products, self._untouched, self._options)
        else:
            tensors = {}
            for product in builder.products:
                tensors |= self._product(product)
        matrices = {name for product in builder.products for name in product.matrices if not is_router(name)}
        names = [name for name in self._untouched.names() if name.startswith(prefix)]
        self._writer.write(tensors | self._rest(names, matrices, tensors))
        return self._forward(index, layer, hidden)

    def _product(self, product: Observed) -> dict[str, Tensor]:
        """Quantises the matrices of a product, which computes with them from then on."""
        tensors: dict[str, Tensor] = {}
        if any(map(is_router, product.matrices)):
            return tensors
        if self._options.method != "gptq":
            for name, weight in product.matrices.items():
                tensors |= _rounded(name, weight, self._options)
            return tensors
        rounded = {}
        for name, weight in product.matrices.items():
            size = group(self._options, weight.shape[1])
            matrix = gptq_rounded(weight, product.gram, self._options.bits, size)
            tensors |= gptq.pack_matrix(name, matrix)
            rounded[name] = matrix.dense()
        product.replace(rounded)
        return tensors

    def _rest(self, names: Sequence[str], matrices: set[str], written: Collection[str]) -> dict[str, Tensor]:
        """The tensors of those names that are copied."""
        rest = {}
        for name in names:
            if name in written or name.removesuffix(".weight") in matrices:
                self._untouched.drop(name)
            else:
                rest[name] = self._untouched.take_raw(name, None)
        return rest

    def _forward(self, index: int, layer: Layer, hidden: list[Tensor]) -> list[Tensor]:
        if not hidden:
            return []
        cos, sin = self._tables[self._config.ropes[index]]
        attend = DenseAttend(self._config.attention)
        return [
            layer_forward(self._config, layer, index, states, (cos[: len(states)], sin[: len(states)]), attend)
            for states in hidden
        ]


def _rounded(name: str, weight: Tensor, options: Options) -> dict[str, Tensor]:
    """The tensors of a matrix, by a method that looks at nothing else."""
    if options.method == "fp8":
        return fp8.pack_matrix(name, weight)
    if options.method == "nf4":
        return bitsandbytes.pack_matrix(name, weight)
    if options.group_size is None:
        return compressed_tensors.pack_matrix(name, int8_rows(weight))
    return compressed_tensors.pack_matrix(name, symmetric(weight, options.bits, group(options, weight.shape[1])))
