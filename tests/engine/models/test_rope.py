"""RoPE variants compared with transformers' own, for configs of both generations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from engine.core.reference import float64
from engine.models.rope import Rope, read_rope, read_ropes_by_layer_type
from engine.protocol.types import EngineError
from tests.closeness import assert_rounded
from tests.rounding import float32_bound

DIM = 32
POSITIONS = 4096
_SHAPE = {"hidden_size": 4 * DIM, "num_attention_heads": 4, "head_dim": DIM, "max_position_embeddings": POSITIONS}

VARIANTS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 8, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "mscale": 0.7, "mscale_all_dim": 1.2},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "mscale": 0.7, "truncate": False},
    {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "short_factor": [1.0 + 0.1 * pair for pair in range(16)],
        "long_factor": [2.0 + 0.5 * pair for pair in range(16)],
    },
    {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "factor": 16.0,
        "attention_factor": 1.3,
    },
]


def their_tables(embedding: Callable[[], Any], positions: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = embedding()(torch.zeros(1), torch.arange(positions)[None], **options)
    # transformers negates half of a head's components where we negate half of the sines.
    sin[..., : sin.shape[-1] // 2] *= -1
    return cos[0], sin[0]


def assert_equal_tables(rope: Rope, embedding: Callable[[], Any], positions: int = POSITIONS, **options: Any) -> None:
    """Check tables against float64's, up to roundings in float32, where angles reach about 4096 radians."""
    with float64():
        exact = their_tables(embedding, positions, **options)
    bound = float32_bound(lambda: torch.stack(their_tables(embedding, positions, **options)))
    for ours, right in zip(rope.tables(positions), exact, strict=True):
        assert_rounded(ours, right, bound)


@pytest.mark.parametrize("settings", VARIANTS)
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_each_variant_equals_transformers_in_both_forms_of_config(settings: dict[str, Any], form: str) -> None:
    if form == "rope_parameters":
        fields = {"rope_parameters": settings | {"rope_theta": 9000.0}}
    else:
        named = {"type" if name == "rope_type" else name: value for name, value in settings.items()}
        fields = {"rope_scaling": named, "rope_theta": 9000.0}
    ours = read_rope(_SHAPE | fields, DIM, theta=1.0, partial=False)
    assert_equal_tables(ours, lambda: LlamaRotaryEmbedding(LlamaConfig(**_SHAPE, **fields)))


@pytest.mark.parametrize("kind", ["su", "longrope"])
def test_phi3_rotates_a_part_of_each_head(kind: str) -> None:
    factors = {"short_factor": [1.5] * 8, "long_factor": [1.0 + pair for pair in range(8)]}
    fields = _SHAPE | {
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 512,
        "rope_scaling": {"type": kind, **factors},
    }
    ours = read_rope(fields, DIM, theta=10_000.0, partial=True)
    assert ours.dim == 16
    config = Phi3Config(**fields | {"rope_scaling": {"type": "longrope", **factors}, "pad_token_id": None})
    assert_equal_tables(ours, lambda: Phi3RotaryEmbedding(config))


@pytest.mark.parametrize("old", [True, False])
def test_gemma3_has_one_rope_for_each_type_of_layer(old: bool) -> None:
    if old:
        fields: dict[str, Any] = {"rope_theta": 5e5, "rope_local_base_freq": 700.0}
        fields["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    else:
        full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
        sliding = {"rope_type": "default", "rope_theta": 700.0}
        fields = {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    thetas = {"full_attention": 1e6, "sliding_attention": fields.get("rope_local_base_freq", 1e4)}
    ours = read_ropes_by_layer_type(_SHAPE | fields, DIM, thetas)
    for layer_type, rope in ours.items():
        assert_equal_tables(
            rope, lambda: Gemma3RotaryEmbedding(Gemma3TextConfig(**_SHAPE, **fields)), layer_type=layer_type
        )


def test_the_maximum_served_length_decides_the_factors_of_longrope() -> None:
    fields = _SHAPE | {"rope_scaling": VARIANTS[-2] | {"attention_factor": 1.0}}
    rope = read_rope(fields, DIM, theta=10_000.0, partial=False)
    for positions in (512, 513):
        assert_equal_tables(rope, lambda: LlamaRotaryEmbedding(LlamaConfig(**fields)), positions)


def test_the_context_ends_where_the_rope_variant_ends() -> None:
    contexts = [
        read_rope(_SHAPE | {"rope_scaling": one}, DIM, theta=1e4, partial=False).context(POSITIONS) for one in VARIANTS
    ]
    assert contexts[:5] == [4096] * 5
    assert contexts[5:7] == [4096, 4 * 4096]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope_type": "axial"}, "axial"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "beta_fast"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 16},
            "16 numbers as 'short_factor'",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_a_missing_or_unknown_rope_field_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineError, match=named):
        read_rope(_SHAPE | {"rope_parameters": settings}, DIM, theta=1e4, partial=False).tables(POSITIONS)
