"""Quantise a checkpoint with one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.config import RawConfig, read_raw_config
from engine.models.decoder import Layer, scaled_embedding
from engine.models.families.config import DecoderConfig
from engine.models.families.read import decoder_config, is_defined
from engine.protocol.types import EngineError
from engine.quantization.awq import awq_layer
from engine.quantization.calibration import DenseAttention, Observed, ObservedBuilder, calibration_sequences
from engine.quantization.checkpoint_writer import CheckpointWriter
from engine.quantization.gptq import round_gptq
from engine.quantization.options import Options, resolve_group_size
from engine.quantization.plan import check_checkpoint, is_router
from engine.quantization.rounding import round_int8_rows, round_symmetric
from engine.weights.formats import awq, bitsandbytes, compressed_tensors, fp8, gptq
from engine.weights.formats.registry import create_reader
from engine.weights.safetensors import Weights

Progress = Callable[[int, int, str], None]
"""Function that is called with the number of parts done, the total, and the name of the next part."""


def quantize(folder: Path, out: Path, options: Options, progress: Progress) -> None:
    """Write the checkpoint in ``folder`` to ``out`` in the public format of the method.

    Embeddings, norms, routers and the output projection are copied. ``rtn`` also quantises an output projection with
    weights of its own, to W8A8: next to 4 bits for the others it would be most of the memory read for a token. Raises
    ``EngineError`` before anything is computed if the checkpoint or the options are not supported.
    """
    raw = read_raw_config(folder)
    if not is_defined(raw.architecture):
        raise EngineError(f"{folder}: architecture {raw.architecture} is not supported for quantisation")
    if raw.fields.get("quantization_config"):
        raise EngineError(f"{folder} is already quantised; name the original checkpoint")
    if raw.wrapper is not None:
        raise EngineError(f"{folder}: {raw.wrapper} is a multimodal model, which is not supported for quantisation")
    config = decoder_config(raw)
    if config.unquantizable_part is not None:
        raise EngineError(f"{folder}: models with {config.unquantizable_part} are not supported for quantisation")
    check_checkpoint(config, folder, options)
    sequences = []
    if options.calibration is not None and options.needs_calibration:
        sequences = calibration_sequences(options.calibration, folder, config)
    with torch.inference_mode(), CheckpointWriter(folder, out, config.num_layers + 1) as writer:
        _Quantization(raw, config, options=options, progress=progress, writer=writer).run(sequences)


class _Quantization:
    def __init__(
        self, raw: RawConfig, config: DecoderConfig, options: Options, progress: Progress, writer: CheckpointWriter
    ) -> None:
        self._raw, self._config, self._options = raw, config, options
        self._progress, self._writer = progress, writer
        self._weights = Weights(raw.folder)
        self._copied = Weights(raw.folder)
        """A second reader, for tensors that are copied. Each tensor is taken from one of the two."""
        self._tables = (
            {rope: rope.tables(config.max_context) for rope in set(config.ropes)} if options.needs_calibration else {}
        )

    def run(self, sequences: list[Tensor]) -> None:
        layers = self._config.num_layers
        hidden = self._embed(sequences) if sequences else []
        for index in range(layers):
            self._progress(index, layers + 1, f"layer {index + 1} of {layers}")
            hidden = self._quantize_layer(index, hidden)
        self._progress(layers, layers + 1, "embeddings")
        head: dict[str, Tensor] = {}
        if self._quantizes_head:
            weight = self._weights.take("lm_head.weight", self._config.vocab_size, self._config.hidden_size)
            head = compressed_tensors.pack_matrix("lm_head", round_int8_rows(weight))
        self._writer.write(head | self._take_copied(self._copied.names(), {"lm_head"} if head else set(), head))
        self._writer.finish(self._raw.fields | {"quantization_config": self._build_format()})
        self._progress(layers + 1, layers + 1, "done")

    @property
    def _quantizes_head(self) -> bool:
        config, options = self._config, self._options
        has_w8a8_format = options.group_size is None or options.bits == 4
        return options.method == "rtn" and has_w8a8_format and not config.tied and not config.num_labels

    def _build_format(self) -> dict[str, Any]:
        options = self._options
        skipped = [] if self._quantizes_head else list(self._config.head.matrices)
        if self._config.experts:
            skipped.append("re:.*gate$" if options.method == "rtn" else "gate")
        if options.method == "rtn":
            head = "lm_head" if self._quantizes_head else None
            return compressed_tensors.build_config(options.bits, options.group_size, skipped, w8a8_module=head)
        size = -1 if options.group_size is None else options.group_size
        if options.method == "gptq":
            return gptq.build_config(options.bits, size, act_order=True)
        if options.method == "awq":
            return awq.build_config(size, skipped)
        if options.method == "fp8":
            return fp8.build_config(skipped)
        return bitsandbytes.build_config(skipped)

    def _embed(self, sequences: list[Tensor]) -> list[Tensor]:
        table = Weights(self._raw.folder).take(
            "model.embed_tokens.weight", self._config.vocab_size, self._config.hidden_size
        )
        return [scaled_embedding(self._config, table[tokens]) for tokens in sequences]

    def _quantize_layer(self, index: int, hidden: list[Tensor]) -> list[Tensor]:
        """Quantise and write a layer. Takes its hidden states on the calibration texts and returns the next layer's."""
        builder = ObservedBuilder(self._config, self._weights, create_reader(None))
        layer, prefix = builder.layer(index), f"model.layers.{index}."
        self._forward(layer, hidden)  # observe the products' inputs
        if self._options.method == "awq":
            tensors = awq_layer(
                self._config, prefix, products=builder.products, others=self._copied, options=self._options
            )
        else:
            tensors = {}
            for product in builder.products:
                tensors |= self._quantize_product(product)
        matrices = {name for product in builder.products for name in product.matrices if not is_router(name)}
        names = [name for name in self._copied.names() if name.startswith(prefix)]
        self._writer.write(tensors | self._take_copied(names, matrices, tensors))
        return self._forward(layer, hidden)

    def _quantize_product(self, product: Observed) -> dict[str, Tensor]:
        """Quantise the matrices of a product. With GPTQ it computes with them from then on."""
        tensors: dict[str, Tensor] = {}
        if any(map(is_router, product.matrices)):
            return tensors
        if self._options.method != "gptq":
            for name, weight in product.matrices.items():
                tensors |= _round_to_nearest(name, weight, self._options)
            return tensors
        rounded = {}
        for name, weight in product.matrices.items():
            size = resolve_group_size(self._options, weight.shape[1])
            matrix = round_gptq(weight, product.gram, self._options.bits, size)
            tensors |= gptq.pack_matrix(name, matrix)
            rounded[name] = matrix.dense()
        product.replace(rounded)
        return tensors

    def _take_copied(self, names: Sequence[str], matrices: set[str], written: Collection[str]) -> dict[str, Tensor]:
        """Return those of the named tensors that are copied unchanged."""
        copied = {}
        for name in names:
            if name in written or name.removesuffix(".weight") in matrices:
                self._copied.drop(name)
            else:
                copied[name] = self._copied.take_raw(name, None)
        return copied

    def _forward(self, layer: Layer, hidden: list[Tensor]) -> list[Tensor]:
        if not hidden:  # no calibration, no tables
            return []
        tables = self._tables[self._config.ropes[layer.index]]
        attend = DenseAttention(self._config.attention)
        outputs = []
        for states in hidden:
            angles = [table[: len(states)] for table in tables]
            attn_out = layer.attend(layer.project(states), angles, attend)
            outputs.append(layer.forward_mlp(states, attn_out)[0])
        return outputs


def _round_to_nearest(name: str, weight: Tensor, options: Options) -> dict[str, Tensor]:
    """Return the tensors of a matrix, by a method that needs no calibration."""
    if options.method == "fp8":
        return fp8.pack_matrix(name, weight)
    if options.method == "nf4":
        return bitsandbytes.pack_matrix(name, weight)
    if options.group_size is None:
        return compressed_tensors.pack_matrix(name, round_int8_rows(weight))
    return compressed_tensors.pack_matrix(
        name, round_symmetric(weight, options.bits, resolve_group_size(options, weight.shape[1]))
    )
