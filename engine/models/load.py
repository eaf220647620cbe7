"""Load a model from a checkpoint folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.device import CPU, DeviceConfig
from engine.gguf.folder import weight_files
from engine.models.config import ModelConfig, read_raw_config
from engine.models.decoder import Decoder
from engine.models.families import decoder_config, is_defined
from engine.models.interface import Model
from engine.models.transformers_backend import TransformersModel
from engine.protocol.types import EngineError
from engine.weights.formats.registry import create_reader
from engine.weights.gguf import GgufWeights
from engine.weights.safetensors import Weights


def load_model(folder: Path, capacity: Callable[[ModelConfig], int], device_config: DeviceConfig = CPU) -> Model:
    """Load the checkpoint in ``folder``: a ``Decoder`` if its architecture is defined here, else through transformers.

    ``capacity``: the number of tokens of such a model that the memory will hold, which bounds a sequence's length.
    ``device_config`` must be ``CPU`` for models that transformers runs. Raises ``EngineError`` naming what is missing,
    damaged or not supported.
    """
    raw = read_raw_config(folder)
    quantized = raw.fields.get("quantization_config")
    if not is_defined(raw.architecture):
        if quantized:
            raise EngineError(f"{folder}: quantization_config is not supported for {raw.architecture}")
        return TransformersModel(raw)
    config = decoder_config(raw)
    try:
        context = min(config.max_context, capacity(config))
        if paths := weight_files(folder):
            gguf = GgufWeights(paths)
            return Decoder(config, gguf, context, lambda _, *matrix: gguf.take_matrix(*matrix), device_config)
        return Decoder(config, Weights(folder), context, create_reader(quantized), device_config)
    except EngineError as error:
        raise error if str(folder) in str(error) else EngineError(f"{folder}: {error}") from None
