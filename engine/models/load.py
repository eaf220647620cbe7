"""From a folder to a model: the architectures defined here, and all others through transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.models.config import ModelConfig, read_raw_config
from engine.models.decoder import Decoder
from engine.models.families import decoder_config, is_defined
from engine.models.foreign import ForeignModel
from engine.models.model import Model
from engine.models.weights import Weights


def load_model(folder: Path, capacity: Callable[[ModelConfig], int]) -> Model:
    """Loads the checkpoint in ``folder``.

    ``capacity``: how many tokens of such a model the memory will hold; no longer sequence is ever computed.
    Raises ``EngineError`` that names what is missing, damaged or not supported.
    """
    raw = read_raw_config(folder)
    if not is_defined(raw.architecture):
        return ForeignModel(raw)
    config = decoder_config(raw)
    return Decoder(config, Weights(folder), min(config.context, capacity(config)))
