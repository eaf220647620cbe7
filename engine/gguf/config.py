"""Turn a GGUF file's metadata into the fields of a Hugging Face ``config.json``.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#llm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.gguf.file import GgufModel, refuse_wrong_types
from engine.gguf.special_tokens import read_special_tokens
from engine.protocol.types import EngineError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_MODEL_TYPES = {"qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
"""transformers' names of architectures that llama.cpp names otherwise."""
_LARGEST_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose attention scale follows from another size than a head's."""
_GEMMA3_WINDOW_PERIOD = 6


@dataclass(frozen=True, slots=True)
class _Metadata:
    """The fields of an architecture, by the name behind its prefix."""

    model: GgufModel
    architecture: str

    def get(self, name: str, default: Any = None) -> Any:
        return self.model.metadata.get(f"{self.architecture}.{name}", default)

    def require(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise EngineError(f"{self.model.paths[0]} lacks the field {self.architecture}.{name}")
        return value


def read_architecture(model: GgufModel) -> str:
    """Return the architecture's name in GGUF. Raises ``EngineError`` if it is not supported."""
    name = model.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise EngineError(
            f"{model.paths[0]}: the architecture {name!r:.80} is not supported; supported are "
            f"{', '.join(_ARCHITECTURES)}"
        )
    return str(name)


_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
"""Fields of ``general.sampling``, which llama.cpp writes from ``generation_config.json``, by their names there."""


def generation_fields(model: GgufModel) -> dict[str, Any]:
    """Return the fields of ``generation_config.json``: end tokens, and the sampling that the file recommends."""
    values = {ours: model.metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    sampling = {name: round(value, 6) for name, value in values.items() if value is not None}  # of float32
    return {"eos_token_id": list(read_special_tokens(model).ends)} | (
        {"do_sample": True} | sampling if sampling else {}
    )


def config_fields(model: GgufModel) -> dict[str, Any]:
    """Return the fields of ``config.json``. Raises ``EngineError`` naming what is missing or not supported."""
    with refuse_wrong_types(model.paths[0]):
        return _config_fields(model, read_architecture(model))


def _config_fields(model: GgufModel, architecture: str) -> dict[str, Any]:
    metadata = _Metadata(model, architecture)
    heads, hidden = _one_number(metadata, "attention.head_count"), int(metadata.require("embedding_length"))
    head_dim = int(metadata.get("attention.key_length") or hidden // heads)
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise EngineError(f"{model.paths[0]} lacks the tensor 'token_embd.weight'")
    fields = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _one_number(metadata, "feed_forward_length"),
        "num_hidden_layers": _num_layers(metadata),
        "num_attention_heads": heads,
        "num_key_value_heads": _one_number(metadata, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": int(metadata.require("context_length")),
        "rms_norm_eps": float(metadata.require("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(metadata.get("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "eos_token_id": list(read_special_tokens(model).ends),
    }
    if wrong := [name for name, value in fields.items() if type(value) is int and value < 1]:
        raise EngineError(f"{model.paths[0]}: {wrong[0]} follows as {fields[wrong[0]]}, but must be at least 1")
    if architecture == "llama" and metadata.get("expert_count"):
        fields |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    if architecture == "llama" and "blk.0.attn_q.bias" in model.tensors:
        fields["attention_bias"] = True
    if experts := metadata.get("expert_count"):
        fields |= {"num_experts": int(experts), "num_experts_per_tok": int(metadata.require("expert_used_count"))}
    if architecture == "qwen3moe":
        fields |= {"moe_intermediate_size": int(metadata.require("expert_feed_forward_length")), "norm_topk_prob": True}
    if architecture.startswith("gemma"):
        fields |= _gemma_fields(metadata, hidden // heads, head_dim)
    if architecture == "phi3":
        fields |= {"sliding_window": metadata.get("attention.sliding_window")}
    return fields | _rope_fields(metadata, fields)


def _num_layers(metadata: _Metadata) -> int:
    """Return the number of layers, all of which have tensors: memory is laid out by it before any is looked for."""
    claimed, model = int(metadata.require("block_count")), metadata.model
    found = {name.split(".")[1] for name in model.tensors if name.startswith("blk.")}
    if not 0 < claimed <= len(found):
        raise EngineError(f"{model.paths[0]} has tensors of {len(found)} layers, its metadata says {claimed}")
    return claimed


def _one_number(metadata: _Metadata, name: str, default: int | None = None) -> int:
    """Return a number that files may give for each layer; all layers must have the same."""
    value = metadata.require(name) if default is None else metadata.get(name, default)
    numbers = np.unique(value)
    if len(numbers) != 1:
        raise EngineError(f"{metadata.model.paths[0]}: {name} differs between layers, which is not supported")
    return int(numbers[0])


def _gemma_fields(metadata: _Metadata, hidden_per_head: int, head_dim: int) -> dict[str, Any]:
    is_largest = metadata.require("block_count") == _LARGEST_GEMMA_LAYERS[metadata.architecture]
    fields = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden_per_head if is_largest else head_dim,
        "sliding_window": int(metadata.require("attention.sliding_window")),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }
    if metadata.architecture == "gemma2":
        return fields | {"attn_logit_softcapping": metadata.get("attn_logit_softcapping")}
    return fields | {"sliding_window_pattern": _GEMMA3_WINDOW_PERIOD}


def _rope_fields(metadata: _Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of scaled and partial rotary embeddings."""
    kind, tensors = metadata.get("rope.scaling.type", "none"), metadata.model.tensors
    original = int(metadata.get("rope.scaling.original_context_length") or fields["max_position_embeddings"])
    rope: dict[str, Any] = {}
    if "rope_factors_long.weight" in tensors:
        factor = fields["max_position_embeddings"] / original
        rope = {"rope_type": "longrope", "factor": factor} | {
            f"{name}_factor": _numbers(metadata.model, f"rope_factors_{name}.weight") for name in ("short", "long")
        }
    elif "rope_freqs.weight" in tensors:
        # Llama 3's scaling is stored as its result: a divisor for each frequency, whatever the length.
        divisors = _numbers(metadata.model, "rope_freqs.weight")
        rope = {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
    elif kind in ("linear", "yarn"):
        rope = {"rope_type": kind, "factor": float(metadata.require("rope.scaling.factor"))}
    elif kind != "none":
        raise EngineError(f"{metadata.model.paths[0]}: rope.scaling.type {kind!r} is not supported")
    result: dict[str, Any] = {}
    if rope:
        result["rope_scaling"] = rope | {"original_max_position_embeddings": original}
    share = int(metadata.get("rope.dimension_count", fields["head_dim"])) / fields["head_dim"]
    if share != 1:
        result["partial_rotary_factor"] = share
    return result


def _numbers(model: GgufModel, name: str) -> list[float]:
    tensor = model.tensors[name]
    if tensor.kind.name != "F32":
        raise EngineError(f"{tensor.path}: {name!r} is {tensor.kind.name}, but must be F32")
    return [float(value) for value in np.frombuffer(tensor.data, "<f4")]
