"""The header of a GGUF file, and transformers' config and rotary embedding for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, Keys
from torch import Tensor

from engine.core.gguf_reference.fields import create_new_fields

_LOCAL_BASE = 10_000.0
_GEMMA_PERIODS = {"gemma2": 2, "gemma3": 6}
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a model's first file."""

    architecture: str
    _values: Mapping[str, Any]
    _factors: Mapping[str, Any]
    """Numbers of the rotary embedding, by the name of their tensor."""
    _tensors: Mapping[str, int]
    """The number of rows of each tensor."""

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key.format(arch=self.architecture))
        return default if value is None else value

    def first(self, key: str) -> int:
        """Return a number that may be given for each layer."""
        return int(np.atleast_1d(self.get(key))[0])

    def has(self, tensor: str) -> bool:
        """Return True if a tensor's name ends so."""
        return any(name.endswith(tensor) for name in self._tensors)

    def count_rows(self, tensor: str) -> int:
        """Return the number of rows of a tensor; 0 if there is none."""
        return self._tensors.get(tensor, 0)

    def get_numbers(self, tensor: str) -> Any:
        """Return the numbers of a tensor of the rotary embedding; ``None`` if there is none."""
        return self._factors.get(tensor)

    @property
    def head_dim(self) -> int:
        heads = self.first(Keys.Attention.HEAD_COUNT) or 1
        return int(self.get(Keys.Attention.KEY_LENGTH, self.get(Keys.LLM.EMBEDDING_LENGTH) // heads))

    @property
    def num_layers(self) -> int:
        """The number of layers without those that predict several tokens."""
        return int(self.get(Keys.LLM.BLOCK_COUNT) - self.get(Keys.LLM.NEXTN_PREDICT_LAYERS, 0))

    def create_config(self, config_class: Any, vocab_size: int) -> Any:
        """Return the config of the model, without what its positions need."""
        hidden, heads = self.get(Keys.LLM.EMBEDDING_LENGTH), self.first(Keys.Attention.HEAD_COUNT)
        layers, experts = self.num_layers, self.get(Keys.LLM.EXPERT_COUNT, 0)
        moe_size = self.get(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH)
        fields = {
            "vocab_size": vocab_size,
            "pad_token_id": None,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": int(np.max(self.get(Keys.Attention.HEAD_COUNT_KV, 0))),
            "head_dim": self.head_dim,
            "intermediate_size": int(np.atleast_1d(self.get(Keys.LLM.FEED_FORWARD_LENGTH, moe_size))[0]),
            "max_position_embeddings": self.get(Keys.LLM.CONTEXT_LENGTH),
            "rms_norm_eps": self.get(Keys.Attention.LAYERNORM_RMS_EPS),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "sliding_window": self.get(Keys.Attention.SLIDING_WINDOW, 4096 if self.architecture == "gemma2" else None),
        }
        if self.architecture == "llama":
            fields["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        if experts:
            fields |= {"num_experts": experts, "num_local_experts": experts, "moe_intermediate_size": moe_size}
            fields |= {"num_experts_per_tok": self.get(Keys.LLM.EXPERT_USED_COUNT)}
            fields |= {"norm_topk_prob": self.get(Keys.LLM.EXPERT_WEIGHTS_NORM, True)}
        new = create_new_fields(self, layers, self.head_dim)
        if new is not None:
            fields |= new
        elif self.architecture in _GEMMA_PERIODS:
            caps = (30.0, 50.0) if self.architecture == "gemma2" else (None, None)
            fields |= {
                "layer_types": self._layer_types(),
                "query_pre_attn_scalar": hidden // heads if layers == _GEMMA_27B[self.architecture] else self.head_dim,
                "final_logit_softcapping": self.get(Keys.LLM.FINAL_LOGIT_SOFTCAPPING, caps[0]),
                "attn_logit_softcapping": self.get(Keys.LLM.ATTN_LOGIT_SOFTCAPPING, caps[1]),
                "hidden_activation": "gelu_pytorch_tanh",
            }
        elif self.architecture != "phi3":
            fields["sliding_window"] = None
            fields |= self._create_own_fields(layers)
        else:
            fields["partial_rotary_factor"] = self.get(Keys.Rope.DIMENSION_COUNT, self.head_dim) / self.head_dim
        return config_class.from_dict(fields)

    def _create_own_fields(self, layers: int) -> dict[str, Any]:
        if self.architecture == "granite":
            return {
                "embedding_multiplier": self.get(Keys.LLM.EMBEDDING_SCALE, 1.0),
                "residual_multiplier": self.get(Keys.LLM.RESIDUAL_SCALE, 1.0),
                "attention_multiplier": self.get(Keys.Attention.SCALE, 1.0),
                "logits_scaling": self.get(Keys.LLM.LOGIT_SCALE, 1.0),
            }
        if self.architecture == "lfm2":
            kv_heads = np.broadcast_to(self.get(Keys.Attention.HEAD_COUNT_KV), layers)
            return {
                "num_key_value_heads": int(kv_heads.max()),
                "layer_types": ["full_attention" if one else "conv" for one in kv_heads],
                "conv_L_cache": self.get(Keys.ShortConv.L_CACHE),
                "norm_eps": self.get(Keys.Attention.LAYERNORM_RMS_EPS),
                "block_auto_adjust_ff_dim": False,
            }
        return {}

    def _layer_types(self) -> list[str]:
        layers = self.get(Keys.LLM.BLOCK_COUNT)
        pattern = self.get(Keys.Attention.SLIDING_WINDOW_PATTERN, _GEMMA_PERIODS[self.architecture])
        is_full = [layer % pattern == pattern - 1 for layer in range(layers)] if np.ndim(pattern) == 0 else ~pattern
        return ["full_attention" if full else "sliding_attention" for full in is_full]

    def set_rotary(self, model: Any, context: int) -> None:
        """Give a model the rotary embedding of the header, for sequences of at most ``context`` tokens.

        Those of ``create_new_fields`` have it from their config.
        """
        if create_new_fields(self, self.num_layers, self.head_dim) is not None:
            return
        module = next(part for name, part in model.named_modules() if name.endswith("rotary_emb"))
        frequencies, magnitude = self._compute_frequencies(context)
        if self.architecture != "gemma3":
            _set_frequencies(module, "", frequencies, magnitude)
            return
        base = self.get("{arch}.rope.local.freq_base", _LOCAL_BASE)
        local = float(self.get(Keys.Rope.FREQ_BASE_SWA, base)) ** -_compute_exponents(self.head_dim)
        for kind, values in (("full_attention", frequencies), ("sliding_attention", local)):
            if kind in self._layer_types():
                _set_frequencies(module, f"{kind}_", values, 1.0)

    def _compute_frequencies(self, context: int) -> tuple[Any, float]:
        """Return the angles of neighbouring positions, and the factor of sines and cosines, as llama.cpp has them."""
        get, trained = self.get, self.get(Keys.LLM.CONTEXT_LENGTH)
        dim = int(get(Keys.Rope.DIMENSION_COUNT, self.head_dim))
        base = float(get(Keys.Rope.FREQ_BASE, get("{arch}.rope.global.freq_base", 10_000.0)))
        kind, original = get(Keys.Rope.SCALING_TYPE, "linear"), get(Keys.Rope.SCALING_ORIG_CTX_LEN, trained)
        factor = float(get(Keys.Rope.SCALING_FACTOR, get("{arch}.rope.scale_linear", 1.0))) or 1.0
        magnitude = float(get(Keys.Rope.SCALING_ATTN_FACTOR, 1.0))
        frequencies = base ** -_compute_exponents(dim)
        if kind == "yarn":
            fast, slow = get(Keys.Rope.SCALING_YARN_BETA_FAST, 32.0), get(Keys.Rope.SCALING_YARN_BETA_SLOW, 1.0)
            # The dimension that turns so many times within the original context.
            low, high = (
                dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(base)) for beta in (fast, slow)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
            ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
            implied = (1 + 0.1 * math.log(max(factor, 1.0))) * magnitude
            return (
                frequencies * (1 - ramp) + frequencies / factor * ramp,
                float(get(Keys.Rope.SCALING_YARN_ATTN_FACTOR, implied)),
            )
        part = "long" if context > original else "short"
        divisors = self._factors.get(f"rope_factors_{part}.weight", self._factors.get("rope_freqs.weight", 1.0))
        return frequencies / divisors / (1.0 if kind == "none" else factor), magnitude


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a model, from its first file."""
    reader = GGUFReader(path)
    values = {name: _read_contents(field) for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = {name: tensor.data.astype(np.float64) for name, tensor in tensors.items() if name.startswith("rope_f")}
    architecture = str(values["general.architecture"])
    return GgufHeader(architecture, values, factors, {name: int(one.shape[-1]) for name, one in tensors.items()})


def _read_contents(field: Any) -> Any:
    value = field.contents()
    return np.array(value) if isinstance(value, list) else value


def _compute_exponents(dim: int) -> Any:
    return np.arange(0, dim, 2) / dim


def _set_frequencies(module: Any, prefix: str, frequencies: Any, magnitude: float) -> None:
    for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
        buffer: Tensor = getattr(module, name)
        setattr(module, name, torch.as_tensor(frequencies, dtype=buffer.dtype))
    name = f"{prefix}attention_scaling"
    assert hasattr(module, name), name
    setattr(module, name, magnitude)
