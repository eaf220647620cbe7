"""From a folder to a model: the architectures defined here, and all others through transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.device import CPU, DeviceConfig
from engine.models.config import ModelConfig, read_raw_config
from engine.models.decoder import Decoder
from engine.models.families import decoder_config, is_defined
from engine.models.interface import Model
from engine.models.transformers_backend import TransformersModel
from engine.protocol.types import EngineError
from engine.weights.formats.registry import create_reader
from engine.weights.safetensors import Weights


def load_model(folder: Path, capacity: Callable[[ModelConfig], int], device_config: DeviceConfig = CPU) -> Model:
    """Loads the checkpoint in ``folder`` into ``device_config``, which is the host for all that transformers runs.

    ``capacity``: how many tokens of such a model the memory will hold; no longer sequence is ever computed.
    Raises ``EngineError`` that names what is missing, damaged or not supported.
    """
    raw = read_raw_config(folder)
    quantized = raw.fields.get("quantization_config")
    if not is_defined(raw.architecture):
        if quantized:
            raise EngineError(f"{folder}: quantization_config is not supported for {raw.architecture}")
        return TransformersModel(raw)
    config = decoder_config(raw)
    try:
        read = create_reader(quantized)
        return Decoder(config, Weights(folder), min(config.max_context, capacity(config)), read, device_config)
    except EngineError as error:
        raise error if str(folder) in str(error) else EngineError(f"{folder}: {error}") from None
