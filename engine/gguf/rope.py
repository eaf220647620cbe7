"""The rotary embedding that a GGUF file's metadata asks for, as fields of a Hugging Face ``config.json``.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#rope. What they leave open is read as
llama.cpp does: without ``rope.scaling.type`` a factor is linear, as is the older ``rope.scale_linear``; 0 is no factor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.gguf.fields.delta import ARCHITECTURES as DELTA_ARCHITECTURES
from engine.gguf.fields.mamba import ARCHITECTURES as MAMBA_ARCHITECTURES
from engine.gguf.fields.mamba import has_rope
from engine.gguf.file import GgufModel
from engine.gguf.metadata import Metadata
from engine.protocol.types import EngineError

_DIVISORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (_DIVISORS, _LONG, _SHORT)
"""Tensors that hold numbers of the rotary embedding and become fields of the config."""
_LOCAL_BASE = 10_000.0
_NOT_ROTATED = 1e20
"""Least divisor of a pair of dimensions that is not rotated."""
_GATHERED = "olmo2", "gpt-oss", "mistral3", "deepseek2"


def rope_fields(metadata: Metadata, head_dim: int, positions: int) -> dict[str, Any]:
    """Return the fields. Raises ``EngineError`` naming what is not supported.

    ``head_dim``: dimensions of a head. ``positions``: the context's length in tokens.
    """
    architecture = metadata.architecture
    if architecture in MAMBA_ARCHITECTURES and not has_rope(metadata):
        metadata.ignore("rope.freq_base", "rope.dimension_count")
        return {}
    if architecture == "gemma4":
        return _gather_gemma4(metadata, head_dim)
    # Ollama names Gemma's two bases by where they are used.
    base = metadata.get_number("rope.freq_base", metadata.get_number("rope.global.freq_base", 10_000.0))
    fields = {"rope_theta": base} | _local_fields(metadata, base)
    dim = int(metadata.get("rope.dimension_count", head_dim))
    metadata.expect("rope.dimension_count_swa", dim)
    if architecture in DELTA_ARCHITECTURES:
        pass  # which rotate a part of a head, as another field says
    elif architecture == "phi3" and 0 < dim <= head_dim and dim % 2 == 0:
        fields |= {"partial_rotary_factor": dim / head_dim} if dim != head_dim else {}
    else:
        metadata.expect("rope.dimension_count", head_dim)
    original = int(metadata.get("rope.scaling.original_context_length") or positions)
    if scaling := _read_scaling(metadata, dim):
        if architecture == "gemma3" and scaling["rope_type"] != "linear":
            wrong = metadata.get("rope.scaling.type", "linear") not in ("none", "linear")
            name = "rope.scaling.type" if wrong else "rope.scaling.attn_factor"
            raise metadata.refuse(name, metadata.get(name), "linear" if wrong else "1")
        fields["rope_scaling"] = scaling | {"original_max_position_embeddings": original}
    return _gather(metadata, fields) if architecture in _GATHERED else fields


def _gather(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields as ``rope_parameters``, for architectures whose defaults are those of a scaled embedding."""
    plain = {"rope_type": "default", "rope_theta": fields["rope_theta"]}
    settings = plain | fields.get("rope_scaling", {})
    if metadata.architecture == "olmo2":  # only layers that see all tokens are scaled
        return {"rope_parameters": {"full_attention": settings, "sliding_attention": plain}}
    if metadata.architecture == "gpt-oss":
        settings |= {"truncate": False} if settings["rope_type"] == "yarn" else {}
        return {"rope_parameters": settings}
    share = float(metadata.get("rope.scaling.yarn_log_multiplier", 0.0))
    if metadata.architecture == "deepseek2":
        if settings["rope_type"] != "yarn":
            return {"rope_parameters": settings}
        if not share:
            raise metadata.refuse("rope.scaling.yarn_log_multiplier", share, "a tenth of the model's mscale_all_dim")
        share = round(10 * share, 6)  # of a float32
        return {"rope_parameters": settings | {"attention_factor": None, "mscale": share, "mscale_all_dim": share}}
    if share:
        settings |= {"attention_factor": None, "mscale": 1.0, "mscale_all_dim": share}
    settings["llama_4_scaling_beta"] = float(metadata.get("attention.temperature_scale", 0.0))
    return {"rope_parameters": settings}


def _gather_gemma4(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """Return the two embeddings of Gemma 4. ``head_dim``: of layers with a window.

    In the others only some pairs are rotated: the first ones, as the divisors of the rest are huge.
    """
    global_dim = int(metadata.require("attention.key_length"))
    metadata.expect("rope.dimension_count", global_dim)
    metadata.expect("rope.dimension_count_swa", head_dim)
    share = 1.0
    if _DIVISORS in metadata.model.tensors:
        divisors = np.array(_read_numbers(metadata.model, _DIVISORS, global_dim // 2))
        share = float((divisors == 1).mean())
        if not ((divisors == 1) | (divisors >= _NOT_ROTATED)).all() or (np.diff(divisors) < 0).any():
            raise EngineError(f"{metadata.model.paths[0]}: {_DIVISORS!r} must be ones, then {_NOT_ROTATED:.0e} or more")
    return {
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "proportional", "partial_rotary_factor": share},
                "rope_theta": metadata.get_number("rope.freq_base", 10_000.0),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.get_number("rope.freq_base_swa", _LOCAL_BASE),
            },
        }
    }


def _local_fields(metadata: Metadata, base: float) -> dict[str, Any]:
    """Return the fields of layers with a sliding window, which in Gemma 3 have a base of their own."""
    if metadata.architecture == "gemma3":
        named = metadata.get_number("rope.local.freq_base", _LOCAL_BASE)
        return {"rope_local_base_freq": metadata.get_number("rope.freq_base_swa", named)}
    metadata.expect("rope.freq_base_swa", base)
    return {}


def _read_scaling(metadata: Metadata, dim: int) -> dict[str, Any]:
    """Return ``rope_scaling``; empty if nothing is scaled. ``dim``: number of a head's dimensions that are rotated."""
    kind = metadata.get("rope.scaling.type", "linear")
    old = metadata.get_number("rope.scale_linear", 1.0, is_zero_unset=True)
    factor = metadata.get_number("rope.scaling.factor", old, is_zero_unset=True)
    magnitude = metadata.get_number("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise metadata.refuse("rope.scaling.type", kind, "none, linear, yarn or longrope")
    if kind == "yarn":
        return _read_yarn(metadata, factor, magnitude)
    if kind == "none":
        factor = 1.0
    short, long = _find_divisors(metadata, kind, dim)
    if short is None and magnitude == 1.0:
        return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    # Divisors of all frequencies are the most general form: a linear factor is one for all of them.
    ones = [1.0] * (dim // 2)
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "short_factor": [number * factor for number in short or ones],
        "long_factor": [number * factor for number in long or ones],
        "attention_factor": magnitude,
    }


def _find_divisors(metadata: Metadata, kind: str, dim: int) -> tuple[list[float] | None, list[float] | None]:
    """Return the divisors of each frequency within the original context and beyond it, if the file has them."""
    model, architecture = metadata.model, metadata.architecture
    used: set[str] = set()
    if architecture == "phi3" or (architecture == "llama" and kind == "longrope"):
        used = {_LONG, _SHORT}
    elif architecture == "llama":
        used = {_DIVISORS}  # Llama 3's scaling, stored as its result
    found = [name for name in ROPE_TENSORS if name in model.tensors]
    if unused := [name for name in found if name not in used]:
        raise EngineError(
            f"{model.paths[0]} has the tensor {unused[0]!r}, which {architecture} does not use with "
            f"rope.scaling.type {kind!r}"
        )
    if not found:
        return None, None
    if missing := used - set(found):
        raise EngineError(f"{model.paths[0]} has the tensor {found[0]!r} but lacks {min(missing)!r}")
    numbers = {name: _read_numbers(model, name, dim // 2) for name in used}
    return numbers.get(_SHORT, numbers.get(_DIVISORS)), numbers.get(_LONG, numbers.get(_DIVISORS))


def _read_yarn(metadata: Metadata, factor: float, magnitude: float) -> dict[str, Any]:
    if metadata.architecture == "phi3":
        raise metadata.refuse("rope.scaling.type", "yarn", "none or linear")
    if found := [name for name in ROPE_TENSORS if name in metadata.model.tensors]:
        raise EngineError(f"{metadata.model.paths[0]} has the tensor {found[0]!r}, which yarn does not use")
    metadata.expect("rope.scaling.yarn_ext_factor", 1.0)
    implied = (1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0) * magnitude
    return {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": metadata.get_number("rope.scaling.yarn_attn_factor", implied),
        "beta_fast": metadata.get_number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.get_number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _read_numbers(model: GgufModel, name: str, count: int) -> list[float]:
    tensor = model.tensors[name]
    if tensor.kind.name != "F32":
        raise EngineError(f"{tensor.path}: {name!r} is {tensor.kind.name}, but must be F32")
    values = np.frombuffer(tensor.data, "<f4")
    if len(values) != count or not (np.isfinite(values).all() and (values > 0).all()):
        raise EngineError(f"{tensor.path}: {name!r} must be {count} positive numbers")
    return [float(value) for value in values]
