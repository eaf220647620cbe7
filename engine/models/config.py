"""What a checkpoint's ``config.json`` says about a decoder, and the refusal of what this engine does not compute."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.attention import LayerAttention
from engine.types import EngineError

_GENERATE = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}
_CLASSIFY = {"LlamaForTokenClassification": False, "Qwen3ForTokenClassification": True}
"""Supported architectures, and whether queries and keys are normalised per head."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers that define a Llama-family decoder."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    rope_theta: float
    qk_norm: bool
    tied: bool
    """The output projection is the embedding table."""
    labels: int
    """Labels of a token-classification model; 0 for a language model."""
    eos: tuple[int, ...]
    extra: dict[str, object]

    @property
    def attention(self) -> tuple[LayerAttention, ...]:
        """What each layer's attention computes."""
        return (LayerAttention(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5),) * self.layers

    """Notes that are none of the engine's business but a client's, such as ``reasoner_prm``."""


def read_config(folder: Path) -> ModelConfig:
    """Reads ``config.json`` (and the end-of-sequence ids of ``generation_config.json``).

    Raises ``EngineError`` when the folder is not a checkpoint or needs a feature that is not supported.
    """
    if not folder.is_dir():
        raise EngineError(f"{folder} is not a folder; give the folder of a Hugging Face checkpoint")
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    defaults = _read_json(generation) if generation.exists() else {}
    try:
        return _config(raw, defaults)
    except KeyError as missing:
        raise EngineError(f"{folder / 'config.json'} lacks {missing}") from None
    except (TypeError, ValueError) as error:
        raise EngineError(f"{folder / 'config.json'} has a value of the wrong kind: {error}") from None
    except EngineError as error:
        raise EngineError(f"{folder}: {error}") from None


def _config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    architecture = next(iter(raw.get("architectures") or []), "none")
    supported = _GENERATE | _CLASSIFY
    if architecture not in supported:
        raise EngineError(f"architecture {architecture} is not supported; supported are {', '.join(sorted(supported))}")
    _refuse_unsupported(raw)
    hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    labels = 0
    if architecture in _CLASSIFY:
        # transformers leaves the label map out when there are the default two.
        labels = len(raw["id2label"]) if "id2label" in raw else int(raw.get("num_labels", 2))
    return ModelConfig(
        architecture=architecture,
        layers=int(raw["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(raw["intermediate_size"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        vocab=int(raw["vocab_size"]),
        context=int(raw["max_position_embeddings"]),
        norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(_rope(raw).get("rope_theta", 10000.0)),
        qk_norm=supported[architecture],
        tied=bool(raw.get("tie_word_embeddings", False)),
        labels=labels,
        eos=_token_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
        extra={name: value for name, value in raw.items() if name.startswith("reasoner_")},
    )


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    for flag in ("attention_bias", "mlp_bias"):
        if raw.get(flag):
            raise EngineError(f"{flag} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise EngineError(f"hidden_act {raw['hidden_act']!r} is not supported; supported is 'silu'")
    if raw.get("quantization_config"):
        raise EngineError("quantization_config is not supported; give an unquantised checkpoint")
    sliding = raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or [])
    if sliding:
        raise EngineError("sliding-window attention is not supported")
    rope = _rope(raw)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise EngineError(f"rope scaling {kind!r} is not supported; supported is 'default'")
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise EngineError("partial_rotary_factor is not supported")


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings under the names of transformers 5, from either generation's config."""
    legacy = {"rope_theta": raw["rope_theta"]} if "rope_theta" in raw else {}
    return legacy | (raw.get("rope_scaling") or {}) | (raw.get("rope_parameters") or {})


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineError(f"{path.parent} has no {path.name}; give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise EngineError(f"{path} is not a JSON object")
    return value
