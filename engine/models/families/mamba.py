"""Read from a config the layers with Mamba-2, and what each layer of such a model consists of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.cache.state_layers import StateLayer
from engine.models.config_fields import UnsupportedField
from engine.protocol.types import EngineError

FIELDS = frozenset(
    {
        *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand"),
        *("mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
        "mamba_chunk_size",  # the result does not depend on it
    }
)
DEFAULTS: dict[str, Any] = {
    **{"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_limit": (0.0, math.inf)},
}
MAMBA, ATTENTION, BOTH, MLP, EXPERTS = "mamba", "attention", "both", "mlp", "moe"
"""Kinds of a layer's first part. In ``BOTH``, Mamba-2 and attention read the same input."""
_KINDS = {"linear_attention": MAMBA, "full_attention": ATTENTION} | {
    kind: kind for kind in (MAMBA, ATTENTION, MLP, EXPERTS)
}
_PATTERN = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS}
"""Kinds by their letters in ``hybrid_override_pattern`` of Nemotron-H."""


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Sizes and switches of layers with Mamba-2, the same in all such layers of a model."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    """Groups of heads that share what is written to and read from a state; a norm is over each group, too."""
    width: int
    """Tokens that the convolution reads, its own included."""
    has_convolution_bias: bool
    has_bias: bool
    """The projections of the layer's input and output have biases."""
    step_sizes: tuple[float, float]
    """Range of the step sizes."""
    norm_eps: float
    kinds: tuple[str, ...]
    """The kind of each layer."""
    has_norm: bool = True
    """Normalise the output."""
    norm_first: bool = False
    """Normalise it before it is gated."""
    factors: tuple[float, ...] | None = None
    """Factors of the projected gates, inputs, ``b``, ``c`` and step sizes; ``None``: 1."""
    output_factor: float = 1.0
    attention_factor: float = 1.0
    """Factor of the output of attention."""
    mlp_factors: tuple[float, float] | None = None
    """Factors of a feed-forward part's gate and of its result; ``None``: 1."""

    @property
    def inner(self) -> int:
        """Width of the output."""
        return self.heads * self.head_dim

    @property
    def projections(self) -> list[int]:
        """Widths of the projected gates, inputs, ``b``, ``c`` and step sizes."""
        return [self.inner, self.inner, *[self.groups * self.state_size] * 2, self.heads]

    @property
    def channels(self) -> int:
        """Channels of the convolution: all inputs, ``b`` and ``c``."""
        return sum(self.projections[1:4])

    @property
    def state(self) -> StateLayer:
        """The inputs of the convolution before the next token, and a matrix for each head."""
        return StateLayer(((self.width - 1, self.channels), (self.heads, self.state_size, self.head_dim)))

    @property
    def state_layers(self) -> frozenset[int]:
        return frozenset(index for index, kind in enumerate(self.kinds) if kind in (MAMBA, BOTH))

    @property
    def num_attention_layers(self) -> int:
        return sum(kind in (ATTENTION, BOTH) for kind in self.kinds)


def read_mamba(prefix: str, fields: dict[str, Any]) -> MambaConfig:
    """Read the config. Raises ``EngineError`` for sizes that do not fit together."""
    heads, hidden = int(fields["mamba_n_heads"]), int(fields["hidden_size"])
    inner = int(fields["mamba_d_ssm"] if fields.get("mamba_d_ssm") else float(fields.get("mamba_expand", 2)) * hidden)
    head_dim = inner // max(heads, 1) if fields["mamba_d_head"] == "auto" else int(fields["mamba_d_head"])
    width, groups, state_size = (int(fields[f"mamba_{name}"]) for name in ("d_conv", "n_groups", "d_state"))
    if prefix == "NemotronH":
        inner = heads * head_dim
        for name, supported in (("mamba_hidden_act", "silu"), ("mlp_hidden_act", "relu2")):
            if fields[name] != supported:
                raise UnsupportedField(f"{name} {fields[name]!r} is not supported; supported is {supported!r}")
    if min(heads, head_dim, groups, state_size) < 1 or width < 2 or heads % groups or heads * head_dim != inner:
        raise EngineError(
            f"{heads} heads of {head_dim} in {groups} groups, a width of {inner}, states of {state_size} and a "
            f"convolution over {width} tokens are no shape of Mamba-2"
        )
    has_own_factors = prefix == "FalconH1"
    return MambaConfig(
        heads=heads,
        head_dim=head_dim,
        state_size=state_size,
        groups=groups,
        width=width,
        has_convolution_bias=bool(fields["mamba_conv_bias"]),
        has_bias=bool(fields["mamba_proj_bias"]),
        step_sizes=_read_step_sizes(prefix, fields),
        norm_eps=float(fields["rms_norm_eps"]),
        kinds=_read_kinds(prefix, fields),
        has_norm=not has_own_factors or bool(fields["mamba_rms_norm"]),
        norm_first=has_own_factors and bool(fields["mamba_norm_before_gate"]),
        **_read_factors(fields) if has_own_factors else {},
    )


def _read_step_sizes(prefix: str, fields: dict[str, Any]) -> tuple[float, float]:
    if prefix == "NemotronH":  # transformers reads nothing else
        return float(fields["time_step_min"]), math.inf
    least, most = map(_read_float, fields["time_step_limit"])
    if not 0 <= least <= most:
        raise EngineError(f"time_step_limit is {fields['time_step_limit']}; it must be a range above 0")
    return least, most


def _read_float(value: Any) -> float:
    """Return a number, which may be written as JSON cannot write it."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _read_factors(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the factors of Falcon-H1."""
    names = "ssm_in_multiplier", "ssm_out_multiplier", "attention_in_multiplier", "attention_out_multiplier"
    given, taken, attention_in, attention_out = (float(fields[name]) for name in names)
    projected = [float(one) for one in fields["ssm_multipliers"] or [1.0] * 5]
    mlp = [float(one) for one in fields["mlp_multipliers"] or [1.0] * 2]
    if len(projected) != 5 or len(mlp) != 2:
        raise EngineError(f"ssm_multipliers has {len(projected)} numbers and mlp_multipliers {len(mlp)}, not 5 and 2")
    return {
        "factors": tuple(given * one for one in projected),
        "output_factor": taken,
        "attention_factor": attention_in * attention_out,
        "mlp_factors": (mlp[0], mlp[1]),
    }


def _read_kinds(prefix: str, fields: dict[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer."""
    if prefix == "NemotronH":
        kinds = _read_part_kinds(fields)
    else:
        num_layers = int(fields["num_hidden_layers"])
        if num_layers < 1:
            raise EngineError(f"num_hidden_layers is {num_layers}; it must be 1 or more")
        if prefix == "GraniteMoeHybrid":
            kinds = _name_kinds(fields, "layer_types", (MAMBA, ATTENTION)) or [MAMBA] * num_layers
            if len(kinds) != num_layers:
                raise EngineError(f"layer_types must be {num_layers} of 'mamba' and 'attention', but is {kinds}")
        elif prefix == "Bamba":
            attended = set(fields.get("attn_layer_indices") or ())
            kinds = [ATTENTION if index in attended else MAMBA for index in range(num_layers)]
        else:
            kinds = [BOTH if prefix == "FalconH1" else MAMBA] * num_layers
    return tuple(kinds)


def _read_part_kinds(fields: dict[str, Any]) -> Sequence[str]:
    """Return the kinds of the layers of Nemotron-H."""
    kinds = _name_kinds(fields, "layers_block_type", (MAMBA, ATTENTION, MLP, EXPERTS))
    if kinds is None:
        pattern = str(fields.get("hybrid_override_pattern") or "")
        if not pattern or set(pattern) - _PATTERN.keys():
            raise EngineError(
                f"hybrid_override_pattern is {pattern!r}; it must have a letter of {''.join(_PATTERN)} for each layer"
            )
        kinds = [_PATTERN[letter] for letter in pattern]
    return kinds


def _name_kinds(fields: dict[str, Any], name: str, allowed: Sequence[str]) -> list[str] | None:
    types = fields.get(name)
    if types is None:
        return None
    kinds = [_KINDS.get(str(kind), str(kind)) for kind in types]
    if others := set(kinds) - set(allowed):
        raise UnsupportedField(f"{name} has {', '.join(sorted(others))}, which is not supported")
    return kinds
