"""Turn a GGUF file's metadata into the fields of a Hugging Face ``config.json``.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#llm.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.gguf.fields.delta import ARCHITECTURES as DELTA_ARCHITECTURES
from engine.gguf.fields.delta import read_delta_fields
from engine.gguf.fields.gemma4 import read_gemma4_fields
from engine.gguf.fields.latent import read_latent_fields
from engine.gguf.fields.mamba import ARCHITECTURES as MAMBA_ARCHITECTURES
from engine.gguf.fields.mamba import NEMOTRON, read_mamba_fields
from engine.gguf.fields.own import read_kv_heads, read_layer_types, read_own_fields
from engine.gguf.file import GgufModel, refuse_wrong_types
from engine.gguf.metadata import Metadata
from engine.gguf.rope import rope_fields
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
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo3ForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "deepseek2": "DeepseekV3ForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_moe": "NemotronHForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
}
_SAME = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
"""Language models of multimodal ones, and the architectures that compute a text as they do."""
_MODEL_TYPES = {
    **{"qwen3moe": "qwen3_moe", "gemma3": "gemma3_text", "olmo2": "olmo3", "mistral3": "ministral3"},
    **{"gpt-oss": "gpt_oss", "qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"},
    **{"gemma4": "gemma4_text", "granitehybrid": "granitemoehybrid", "nemotron_h_moe": "nemotron_h"},
    "falcon-h1": "falcon_h1",
}
"""transformers' names of architectures that llama.cpp names otherwise."""
_PREDICTING = *DELTA_ARCHITECTURES, "deepseek2", "nemotron_h_moe"
"""Architectures whose last layers may be such that predict several tokens."""
_LARGEST_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose attention scale follows from another size than a head's."""


def read_architecture(model: GgufModel) -> str:
    """Return the architecture's name in GGUF. Raises ``EngineError`` if it is not supported.

    The fields of one that computes a text as another does have their own name in front (``Metadata``).
    """
    name = model.metadata.get("general.architecture")
    if name not in {**_ARCHITECTURES, **_SAME}:
        raise EngineError(
            f"{model.paths[0]}: the architecture {name!r:.80} is not supported; supported are "
            f"{', '.join((*_ARCHITECTURES, *_SAME))}"
        )
    return _SAME.get(str(name), str(name))


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
    metadata = Metadata(model, architecture)
    if metadata.prefix in _SAME:
        metadata.ignore("rope.dimension_sections", "n_deepstack_layers")
    hidden = int(metadata.require("embedding_length"))
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise EngineError(f"{model.paths[0]} lacks the tensor 'token_embd.weight'")
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": _num_layers(metadata),
        "max_position_embeddings": int(metadata.require("context_length")),
        "rms_norm_eps": _read_eps(metadata),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "eos_token_id": list(read_special_tokens(model).ends),
    }
    fields |= _read_heads(metadata, hidden) | _feed_forward_fields(metadata)
    if wrong := [name for name, value in fields.items() if type(value) is int and value < 1]:
        raise EngineError(f"{model.paths[0]}: {wrong[0]} follows as {fields[wrong[0]]}, but must be at least 1")
    if architecture == "llama" and "blk.0.attn_q.bias" in model.tensors:
        fields["attention_bias"] = True
    fields |= _own_fields(metadata, fields)
    fields |= rope_fields(metadata, fields.get("head_dim", 0), fields["max_position_embeddings"])
    metadata.refuse_rest()
    return fields


def _read_eps(metadata: Metadata) -> float:
    """Return the decimal number that a checkpoint has, of which the file holds the nearest float32."""
    name = "attention.layer_norm_rms_epsilon"
    if metadata.architecture in NEMOTRON and name not in metadata:
        name = "attention.layer_norm_epsilon"
    return float(str(np.float32(metadata.require(name))))


def _read_heads(metadata: Metadata, hidden: int) -> dict[str, int]:
    """Return the heads of attention, of an architecture that has it."""
    if metadata.architecture == "mamba2":
        return {}
    heads = metadata.get_uniform("attention.head_count")
    head_dim = int(metadata.get("attention.key_length") or hidden // heads)
    kv_heads = heads if metadata.architecture == "gemma4" else read_kv_heads(metadata, heads)
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


def _own_fields(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that an architecture has besides those of all, which ``fields`` are."""
    architecture, head_dim = metadata.architecture, fields.get("head_dim", 0)
    if architecture == "deepseek2":
        return read_latent_fields(metadata) | {"num_key_value_heads": fields["num_attention_heads"]}
    if architecture == "gemma4":
        return read_gemma4_fields(metadata, fields)
    if architecture in DELTA_ARCHITECTURES:
        metadata.expect("attention.value_length", head_dim)
        return read_delta_fields(metadata, fields["num_hidden_layers"], head_dim)
    if architecture in MAMBA_ARCHITECTURES:
        metadata.expect("attention.value_length", head_dim)
        return read_mamba_fields(metadata, fields)
    return _attention_fields(metadata, fields["hidden_size"] // fields["num_attention_heads"], head_dim, fields)


def _num_layers(metadata: Metadata) -> int:
    """Return the number of layers, all of which have tensors: memory is laid out by it before any is looked for."""
    claimed, model = int(metadata.require("block_count")), metadata.model
    if metadata.architecture in _PREDICTING:
        claimed -= int(metadata.get("nextn_predict_layers", 0))
    found = {name.split(".")[1] for name in model.tensors if name.startswith("blk.")}
    if not 0 < claimed <= len(found):
        raise EngineError(f"{model.paths[0]} has tensors of {len(found)} layers, its metadata says {claimed}")
    return claimed


def _feed_forward_fields(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of the layers' feed-forward parts, with experts or without."""
    if metadata.architecture == "gemma4" or metadata.architecture in MAMBA_ARCHITECTURES:
        return {}  # they follow with the others
    experts = int(metadata.get("expert_count", 0))
    if metadata.architecture in ("qwen3next", "qwen35moe"):  # no layer is without experts
        return {
            "intermediate_size": metadata.get_uniform(
                "feed_forward_length", int(metadata.get("expert_feed_forward_length", 0))
            )
        }
    if metadata.architecture == "deepseek2":
        return {"intermediate_size": metadata.get_uniform("feed_forward_length")}
    if metadata.architecture not in ("llama", "qwen3moe", "gpt-oss") or not experts:
        metadata.expect("expert_count", 0)
        return {"intermediate_size": metadata.get_uniform("feed_forward_length")}
    fields: dict[str, Any] = {"num_experts": experts, "num_experts_per_tok": int(metadata.require("expert_used_count"))}
    if metadata.architecture == "qwen3moe":
        size = int(metadata.require("expert_feed_forward_length"))
        is_normalized = bool(metadata.get("expert_weights_norm", True))
        fields |= {"intermediate_size": metadata.get_uniform("feed_forward_length", size)}
        return fields | {"moe_intermediate_size": size, "norm_topk_prob": is_normalized}
    if metadata.architecture == "gpt-oss":
        size = int(metadata.require("expert_feed_forward_length"))
        metadata.expect("feed_forward_length", size)
        metadata.expect("expert_weights_norm", True)
        per_token = fields["num_experts_per_tok"]
        return {"num_local_experts": experts, "num_experts_per_tok": per_token, "intermediate_size": size}
    size = metadata.get_uniform("feed_forward_length")
    metadata.expect("expert_feed_forward_length", size)
    metadata.expect("expert_weights_norm", True)
    fields |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": size}
    return fields


def _attention_fields(
    metadata: Metadata, hidden_per_head: int, head_dim: int, fields: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of windows and soft caps."""
    for length in ("value_length", "key_length_swa", "value_length_swa"):
        metadata.expect(f"attention.{length}", head_dim)
    own = read_own_fields(metadata, fields)
    if own is not None:
        return own
    architecture = metadata.architecture
    is_largest = fields["num_hidden_layers"] == _LARGEST_GEMMA_LAYERS.get(architecture)
    scalar = hidden_per_head if is_largest else head_dim
    metadata.expect("attention.scale", 0.0, scalar**-0.5)
    name = "attention.sliding_window"
    window = int(metadata.get(name, 0))
    if architecture == "phi3":
        return {"sliding_window": window or None}
    if not architecture.startswith("gemma"):
        if 0 < window < fields["max_position_embeddings"]:
            raise metadata.refuse(name, window, "absent: all layers see the whole context")
        return {}
    is_gemma2 = architecture == "gemma2"
    window = int(metadata.get("attention.sliding_window", 4096) if is_gemma2 else metadata.require(name))
    result = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "layer_types": read_layer_types(metadata, fields["num_hidden_layers"]),
        "final_logit_softcapping": metadata.get_cap("final_logit_softcapping", 30.0 if is_gemma2 else 0.0),
    }
    if is_gemma2:
        result["attn_logit_softcapping"] = metadata.get_cap("attn_logit_softcapping", 50.0)
    return result
