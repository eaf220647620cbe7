"""Load a model from a checkpoint folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.adapters.checkpoint import Adapter
from engine.adapters.products import AdapterSet
from engine.device import CPU, DeviceConfig
from engine.gguf.folder import weight_files
from engine.gpu_requirements import check_format
from engine.models.by_transformers.model import TransformersModel
from engine.models.config import ModelConfig, RawConfig, read_raw_config
from engine.models.config_fields import UnsupportedField
from engine.models.decoder import Decoder
from engine.models.families.config import DecoderConfig
from engine.models.families.read import decoder_config, is_defined
from engine.models.gemma4 import Gemma4Decoder
from engine.models.gpt_oss import GptOssDecoder
from engine.models.interface import Model
from engine.models.latent import LatentDecoder
from engine.models.recurrent.hybrid import HybridDecoder
from engine.models.recurrent.mamba import MambaDecoder
from engine.models.sparse import SparseDecoder
from engine.protocol.types import EngineError
from engine.weights.formats.registry import MatrixReader, create_reader, list_gpu_formats
from engine.weights.gguf import GgufWeights
from engine.weights.safetensors import Weights
from kernels.cpu.runtime.memory import release_free_memory
from kernels.linear import blocks

_log = logging.getLogger(__name__)
_ADAPTABLE = Decoder, HybridDecoder
"""Classes whose modules are those of transformers, each with its own matrix."""
_BITS_ON_GPU = "Q4_0", "MXFP4", "NVFP4"
"""Blocks that a GPU multiplies as they are."""


def load_model(
    folder: Path,
    capacity: Callable[[ModelConfig], int],
    device_config: DeviceConfig = CPU,
    *,
    strict_config: bool = False,
    adapters: Sequence[Adapter] = (),
) -> Model:
    """Load the checkpoint in ``folder``: a ``Decoder`` if it is computed here, else through transformers.

    ``capacity``: the number of tokens of such a model that the memory will hold, which bounds a sequence's length.
    ``device_config`` must be ``CPU`` for models that transformers runs. ``strict_config``: raise for a field
    that is not computed here. ``adapters``: those that rows of a step may have. Raises ``EngineError`` naming what is
    missing, damaged or not supported.
    """
    raw = read_raw_config(folder)
    config = choose_decoder(raw, strict_config=strict_config)
    if adapters:
        _check_adaptable(raw, config)
    if isinstance(config, str):
        return _load_by_transformers(raw, config)
    try:
        context = min(config.max_context, capacity(config))
        weights, read = open_weights(raw)
        if isinstance(weights, GgufWeights):
            _tell_layout(folder, weights.block_formats(), device_config)
        else:
            for gpu_format in list_gpu_formats(raw.fields.get("quantization_config")):
                check_format(gpu_format, device_config.device)
        adapter_set = AdapterSet(adapters, device_config) if adapters else None
        model = choose_class(config)(config, weights, context, read, device_config, adapter_set)
    except EngineError as error:
        raise error if str(folder) in str(error) else EngineError(f"{folder}: {error}") from None
    release_free_memory()
    return model


def choose_decoder(raw: RawConfig, *, strict_config: bool = False) -> DecoderConfig | str:
    """Return the config of a model that is computed here, else the reason why transformers computes it.

    Raises ``EngineError`` if neither can, and ``UnsupportedField`` with ``strict_config`` if a field is the reason.
    """
    is_quantized = bool(raw.fields.get("quantization_config"))
    if not is_defined(raw.architecture):
        if is_quantized:
            raise EngineError(f"{raw.folder}: quantization_config is not supported for {raw.architecture}")
        return f"{raw.folder} is a {raw.architecture}"
    try:
        return decoder_config(raw)
    except UnsupportedField as error:
        if strict_config or is_quantized or weight_files(raw.folder) or not raw.architecture.endswith("ForCausalLM"):
            raise
        return str(error)


def choose_class(config: DecoderConfig) -> type[Decoder]:
    """Return the class of decoders that compute a model with this config."""
    if config.latent is not None:
        return LatentDecoder if config.latent.indexer is None else SparseDecoder
    if config.mamba is not None:
        return MambaDecoder
    if config.state_layers:
        return HybridDecoder
    if config.gemma4 is not None:
        return Gemma4Decoder
    return GptOssDecoder if config.has_sinks else Decoder


def _check_adaptable(raw: RawConfig, config: DecoderConfig | str) -> None:
    """Raise ``EngineError`` if adapters of a model are not supported."""
    if isinstance(config, str):
        reason = f"{config}, which transformers computes"
    elif choose_class(config) not in _ADAPTABLE:
        reason = f"{raw.folder} is a {raw.architecture}, whose modules are not those of its checkpoint"
    elif weight_files(raw.folder):
        reason = f"{raw.folder} is a GGUF model, whose rows have another order"
    else:
        return
    raise EngineError(f"adapters are not supported: {reason}; decoders of Llama's kind from safetensors are supported")


def open_weights(raw: RawConfig) -> tuple[Weights, MatrixReader]:
    """Return the tensors of a checkpoint or a GGUF model, and the function that reads a matrix."""
    if paths := weight_files(raw.folder):
        gguf = GgufWeights(paths)
        return gguf, lambda _, *matrix: gguf.take_matrix(*matrix)
    return Weights(raw.folder, is_wrapped=raw.wrapper is not None), create_reader(raw.fields.get("quantization_config"))


def _tell_layout(folder: Path, formats: list[str], device_config: DeviceConfig) -> None:
    """Log which blocks are dequantised, or how many kernels are compiled, as the load is silent meanwhile."""
    if device_config.uses_gpu_kernels:
        widened = [name for name in formats if name not in _BITS_ON_GPU]
        reason = f"on a GPU only {', '.join(_BITS_ON_GPU)} keep their bits"
    elif blocks.is_supported():
        if new := blocks.find_uncompiled(formats):
            _log.warning("%s: compiling kernels for blocks of %s; once, some seconds each", folder, ", ".join(new))
        return
    else:
        widened, reason = formats, "this processor lacks the instructions for blocks (AVX2, or ARM's dot products)"
    if widened:
        dtype = str(device_config.dtype).removeprefix("torch.")
        _log.warning("%s: blocks of %s are dequantised to %s; %s", folder, ", ".join(widened), dtype, reason)


def _load_by_transformers(raw: RawConfig, reason: str) -> Model:
    if not is_defined(raw.architecture):
        return TransformersModel(raw)
    try:
        model = TransformersModel(raw)
    except EngineError as error:
        cause = str(error).removeprefix(f"{raw.folder}: ")
        raise EngineError(f"{reason}; by transformers' code: {cause}") from error
    _log.warning("%s: transformers' own code computes this model, on the CPU (--strict-config refuses it)", reason)
    return model
