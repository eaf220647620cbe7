"""Settings of a LoRA adapter: PEFT's ``adapter_config.json``, checked.

Fields and their meaning are those of PEFT's ``LoraConfig`` (version 0.21). What would change results and is not
computed here is refused by its name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.protocol.types import EngineError

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 256
_ALL_LINEAR = "all-linear"
_NEUTRAL: tuple[object, ...] = None, False, [], {}, ""
_REFUSED = {
    "use_dora": "a decomposition of the weights (DoRA)",
    "modules_to_save": "whole modules of its own",
    "trainable_token_indices": "embeddings of its own",
    "target_parameters": "parameters that are no linear modules",
    "layer_replication": "another number of layers than its base",
    "fan_in_fan_out": "transposed weights",
    "lora_bias": "biases of its own",
    "use_qalora": "pooled inputs (QA-LoRA)",
}
_CHANGED_BASES = "pissa", "olora", "corda", "loftq", "lora_ga"
"""Beginnings of initialisations that change the base's weights, which a checkpoint of the adapter alone does not
have."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The modules that an adapter changes, and the sizes of its updates."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    """Ranks of modules by the ends of their names, which are regular expressions."""
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    """Scale by the root of the rank: Kalajdzievski, "A Rank Stabilization Scaling Factor …", 2023."""
    target_modules: str | tuple[str, ...]
    """A regular expression of whole names, ``all-linear``, or ends of names."""
    exclude_modules: str | tuple[str, ...]
    layers: tuple[int, ...]
    """Layers to change, if ``target_modules`` are ends of names; empty: all."""
    invocation_tokens: tuple[int, ...]
    """Tokens from whose last occurrence in the prompt the adapter is active; empty: from the first token."""
    base_model: str

    def targets(self, module: str) -> bool:
        """Return True if the adapter changes a module, by its name in the base. Never for ``all-linear``, whose
        meaning depends on transformers' classes."""
        if self.target_modules == _ALL_LINEAR or _is_named(self.exclude_modules, module):
            return False
        if not _is_named(self.target_modules, module):
            return False
        if not self.layers or isinstance(self.target_modules, str):
            return True
        index = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        return index is not None and int(index[1]) in self.layers

    def find_rank(self, module: str) -> int:
        """Return the rank of the update of a module."""
        return int(_look_up(self.rank_pattern, module, self.rank))

    def find_scale(self, module: str) -> float:
        """Return the factor of the update of a module."""
        rank, alpha = self.find_rank(module), _look_up(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read the settings of the adapter in a folder. Raises ``EngineError`` that names what is wrong or unsupported."""
    path = folder / CONFIG_FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} is not readable: {error}; an adapter is a folder that PEFT has saved") from None
    if not isinstance(fields, dict):
        raise EngineError(f"{path} must be an object")
    try:
        _refuse_unsupported(fields)
        return _parse(fields)
    except (EngineError, re.error) as error:
        raise EngineError(f"{path}: {error}") from None


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        raise EngineError(f"peft_type is {fields.get('peft_type')!r}; LORA is supported")
    for name, meaning in _REFUSED.items():
        if fields.get(name) not in _NEUTRAL:
            raise EngineError(f"{name} is {fields[name]!r}: adapters with {meaning} are not supported; train without")
    if fields.get("bias", "none") != "none":
        raise EngineError(f"bias is {fields['bias']!r}: adapters with biases are not supported; train with bias none")
    beginning = str(fields.get("init_lora_weights", "")).lower()
    if beginning.startswith(_CHANGED_BASES):
        raise EngineError(
            f"init_lora_weights is {fields['init_lora_weights']!r}, which changes the base's weights: save the "
            "adapter with PEFT's path_initial_model_for_weight_conversion, which makes an ordinary one of it"
        )
    unknown = [name for name, value in fields.items() if name.startswith("use_") and value not in _NEUTRAL]
    if unknown := [name for name in unknown if name != "use_rslora"]:
        raise EngineError(f"{unknown[0]} is {fields[unknown[0]]!r}, which is not supported")


def _parse(fields: Mapping[str, Any]) -> AdapterConfig:
    rank, ranks = fields.get("r"), fields.get("rank_pattern") or {}
    for own in (rank, *ranks.values()):
        if not isinstance(own, int) or isinstance(own, bool) or not 1 <= own <= MAX_RANK:
            raise EngineError(f"a rank is {own!r}; it must be a whole number from 1 to {MAX_RANK}")
    alpha, alphas = fields.get("lora_alpha"), fields.get("alpha_pattern") or {}
    for factor in (alpha, *alphas.values()):
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not math.isfinite(factor):
            raise EngineError(f"lora_alpha is {factor!r}; it must be a number")
    targets = _read_names(fields, "target_modules")
    if not targets:
        raise EngineError("target_modules names no module")
    layers = fields.get("layers_to_transform")
    if layers is not None and not isinstance(layers, int) and not _are_ints(layers):
        raise EngineError(f"layers_to_transform is {layers!r}; it must be a number or a list of numbers")
    tokens = fields.get("alora_invocation_tokens")
    if tokens is not None and (not tokens or not _are_ints(tokens)):
        raise EngineError(f"alora_invocation_tokens is {tokens!r}; it must be a list of token ids")
    assert isinstance(rank, int)
    assert alpha is not None
    return AdapterConfig(
        rank=rank,
        alpha=float(alpha),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        use_rslora=bool(fields.get("use_rslora")),
        target_modules=targets,
        exclude_modules=_read_names(fields, "exclude_modules"),
        layers=() if layers is None else (layers,) if isinstance(layers, int) else tuple(layers),
        invocation_tokens=tuple(tokens or ()),
        base_model=str(fields.get("base_model_name_or_path") or ""),
    )


def _read_names(fields: Mapping[str, Any], name: str) -> str | tuple[str, ...]:
    """Return a regular expression or a list of names, which must be one of both."""
    value = fields.get(name) or ()
    if isinstance(value, str):
        re.compile(value)
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise EngineError(f"{name} is {value!r}; it must be a list of names, a regular expression or all-linear")
    return tuple(value)


def _are_ints(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in values)


def _is_named(names: str | Sequence[str], module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _look_up(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first expression that matches the end of a name."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)
