"""What a model is, as far as the engine around it needs to know, and the reading of a checkpoint's JSON files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.attention.layer import LayerAttentionConfig
from engine.protocol.types import EngineError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers that cache, scheduler and limits need of any model.

    All layers share ``heads``, ``kv_heads`` and ``head_dim``, since one pool holds the keys and values of all. Layers
    with a sliding window keep every token there too: what lies outside the window is masked, not freed.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    """Width of the final hidden states."""
    max_context: int
    """Most tokens of one sequence."""
    num_labels: int
    """Numbers that a classifier or a reward model answers at a token; 0 for a language model."""
    eos: tuple[int, ...]
    extra: dict[str, object]
    """Notes that are none of the engine's business but a client's, such as ``reasoner_prm``."""
    attention: tuple[LayerAttentionConfig, ...]
    """What each layer's attention computes."""

    @property
    def num_layers(self) -> int:
        """Number of attention layers."""
        return len(self.attention)

    @property
    def heads(self) -> int:
        """Query heads of every layer."""
        return self.attention[0].heads

    @property
    def kv_heads(self) -> int:
        """Key-value heads of every layer."""
        return self.attention[0].kv_heads

    @property
    def head_dim(self) -> int:
        """Size of every head."""
        return self.attention[0].head_dim


@dataclass(frozen=True, slots=True)
class RawConfig:
    """The fields of ``config.json``, and what ``generation_config.json`` adds."""

    folder: Path
    fields: dict[str, Any]
    generation: dict[str, Any]

    @property
    def architecture(self) -> str:
        """The class that the checkpoint was saved from."""
        return str(next(iter(self.fields.get("architectures") or []), "none"))

    @property
    def eos(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        value = self.generation.get("eos_token_id", self.fields.get("eos_token_id"))
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (value,)

    @property
    def extra(self) -> dict[str, object]:
        """See ``ModelConfig.extra``."""
        return {name: value for name, value in self.fields.items() if name.startswith("reasoner_")}


def read_raw_config(folder: Path) -> RawConfig:
    """Raises ``EngineError`` when the folder is not a checkpoint, or needs what no model of this engine computes."""
    if not folder.is_dir():
        raise EngineError(f"{folder} is not a folder; give the folder of a Hugging Face checkpoint")
    fields = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return RawConfig(folder, fields, read_json(generation) if generation.exists() else {})


def read_json(path: Path) -> dict[str, Any]:
    """The object in a checkpoint's file. Raises ``EngineError`` that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineError(f"{path.parent} has no {path.name}; give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise EngineError(f"{path} is not a JSON object")
    return value
