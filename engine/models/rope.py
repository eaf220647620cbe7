"""Rotary embeddings (RoPE) of a config, whose fields have the form of old or new versions of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.models.config_fields import UnsupportedField
from engine.protocol.types import EngineError
from kernels.common.rotary import frequencies, rotary_tables

_FIELDS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}
NO_ROPE = "none"
"""Kind of the rotary embedding that leaves queries and keys as they are (NoPE)."""
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}


@dataclass(frozen=True, eq=False, slots=True)
class Rope:
    """One rotary embedding.

    Keys are cached rotated and shared between sequences of any length, so the angles of a position must not depend on
    the length of its sequence. In two variants they do:

    - ``dynamic`` (NTK) leaves sequences within ``max_position_embeddings`` as they are and changes the angles of longer
      ones with every token. Such a model is served up to ``max_position_embeddings``, where it equals transformers.
    - ``longrope`` has other angles for sequences above the original context than for those within it. Here the maximum
      served length decides for all sequences: above the original context all use the long factors, so that longer
      sequences equal transformers; else all use the short ones, and all equal transformers.
    """

    kind: str
    dim: int
    """Number of a head's dimensions that are rotated."""
    parameters: dict[str, Any]
    """``rope_theta``, ``original_max_position_embeddings`` (before the context was extended), the variant's fields."""
    query_scaling: float = 0.0
    """Queries grow by this times the logarithm of the number of original contexts before them, plus 1 (Ministral 3)."""

    def context(self, positions: int) -> int:
        """Return the maximum number of tokens of a sequence, given the config's ``max_position_embeddings``."""
        if self.kind == "yarn":
            original = self.parameters["original_max_position_embeddings"]
            return max(positions, int(original * float(self.parameters["factor"])))
        return positions

    def tables(self, positions: int) -> tuple[Tensor, ...]:
        """Return the ``rotary_tables`` for sequences of at most ``positions`` tokens.

        With ``query_scaling``, and more tokens than the original context, a third table ``[positions, 1]`` has the
        factors of the queries.
        """
        original = self.parameters.get("original_max_position_embeddings", positions)
        if not self.query_scaling or positions <= original:
            return self._rotary_tables(positions)
        contexts = torch.arange(positions, dtype=torch.float32)[:, None].div_(original).floor_()
        return *self._rotary_tables(positions), 1 + self.query_scaling * contexts.log1p_()

    def _rotary_tables(self, positions: int) -> tuple[Tensor, Tensor]:
        if self.kind == NO_ROPE:
            return rotary_tables(torch.zeros(self.dim // 2), positions)
        if self.kind in ("default", "dynamic"):
            return rotary_tables(frequencies(self.dim, self.parameters["rope_theta"]), positions)
        # Imported here, since it takes a second that most models do not need.
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = SimpleNamespace(
            rope_parameters=self.parameters, head_dim=self.dim, standardize_rope_params=lambda: None
        )
        config.hidden_size, config.num_attention_heads = self.dim, 1
        try:
            values, magnitude = ROPE_INIT_FUNCTIONS[self.kind](config, None, positions)
        except (KeyError, TypeError) as error:
            raise EngineError(f"rope scaling {self.kind!r} has missing or invalid fields: {error!r}") from None
        return rotary_tables(values, positions, magnitude)


def read_rope(fields: dict[str, Any], head_dim: int, *, theta: float, partial: bool) -> Rope:
    """Return the rotary embedding that all layers share.

    ``theta``: the family's default. ``partial``: the family may rotate only a part of each head.
    """
    settings = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    if "full_attention" in settings or "sliding_attention" in settings:
        raise UnsupportedField("rope_parameters per layer type are not supported for this architecture")
    return _rope(fields, settings, head_dim, theta=theta, partial=partial)


def read_ropes_by_layer_type(fields: dict[str, Any], head_dim: int, thetas: dict[str, float]) -> dict[str, Rope]:
    """Return the rotary embeddings of Gemma 3 and OLMo 3 by layer type. ``thetas``: their defaults.

    Old configs scale only that of layers without a window.
    """
    settings = dict(fields.get("rope_parameters") or {})
    if not settings.keys() <= {"full_attention", "sliding_attention"}:
        raise EngineError(f"rope_parameters must be per layer type, but it has {sorted(settings)}")
    full = dict(settings.get("full_attention") or {}) | dict(fields.get("rope_scaling") or {})
    sliding = dict(settings.get("sliding_attention") or {})
    sliding.setdefault("rope_theta", thetas["sliding_attention"])
    parts = {"full_attention": full, "sliding_attention": sliding}
    return {kind: _rope(fields, part, head_dim, theta=thetas[kind], partial=False) for kind, part in parts.items()}


def _rope(fields: dict[str, Any], settings: dict[str, Any], head_dim: int, *, theta: float, partial: bool) -> Rope:
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "su" or (kind == "yarn" and "short_factor" in settings):
        kind = "longrope"  # its name in the first Phi-3 configs
    if kind not in _FIELDS:
        raise UnsupportedField(f"rope scaling {kind!r} is not supported; choose one of {', '.join(_FIELDS)}")
    unknown = {name for name in settings.keys() - _COMMON - _FIELDS[kind] if settings[name] is not None}
    if unknown:
        raise UnsupportedField(f"rope scaling {kind!r} has a field that is not supported: {', '.join(sorted(unknown))}")
    share = float(settings.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0)
    if share != 1.0 and not partial:
        raise UnsupportedField("partial_rotary_factor is not supported for this architecture")
    name, positions = "original_max_position_embeddings", int(fields["max_position_embeddings"])
    original = int(fields.get(name) or settings.get(name) or positions)
    parameters = {field: settings[field] for field in _FIELDS[kind] & settings.keys()}
    parameters |= {"rope_theta": float(settings.get("rope_theta") or fields.get("rope_theta") or theta), name: original}
    if kind in ("yarn", "longrope") and parameters.get("factor") is None:
        parameters["factor"] = positions / original
    dim = int(head_dim * share)
    for name in ("short_factor", "long_factor"):
        if kind == "longrope" and len(parameters.get(name) or ()) != dim // 2:
            raise EngineError(f"rope scaling 'longrope' needs {dim // 2} numbers as {name!r}")
    return Rope(kind, dim, parameters)
