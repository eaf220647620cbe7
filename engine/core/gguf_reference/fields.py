"""Fields of transformers' configs that this year's architectures have besides those of all, from a file's header."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from gguf import Keys

Fields = dict[str, Any]
_A, _L, _R, _S = Keys.Attention, Keys.LLM, Keys.Rope, Keys.SSM
_SIGMOID = 2


class Header(Protocol):
    """The header of a file."""

    @property
    def architecture(self) -> str: ...

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture."""
        ...

    def has(self, tensor: str) -> bool:
        """Return True if a layer has a tensor whose name ends so."""
        ...

    def count_rows(self, tensor: str) -> int:
        """Return the number of rows of a tensor, or of the numbers of a vector."""
        ...

    def get_numbers(self, tensor: str) -> Any:
        """Return the numbers of a tensor of the rotary embedding."""
        ...


def create_new_fields(header: Header, layers: int, head_dim: int) -> Fields | None:
    """Return the fields; ``None`` for an architecture that has none here."""
    create = {
        **{"olmo2": _create_olmo3, "mistral3": _create_ministral3, "gpt-oss": _create_gpt_oss},
        **{"deepseek2": _create_deepseek, "gemma4": _create_gemma4, "granitehybrid": _create_granite},
        **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _create_delta),
        **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _create_nemotron),
        **{"falcon-h1": _create_falcon, "mamba2": _create_mamba2},
    }.get(header.architecture)
    return None if create is None else create(header, layers, head_dim)


def _create_rope(header: Header) -> Fields:
    rope = {"rope_type": "default", "rope_theta": header.get(_R.FREQ_BASE, 10_000.0)}
    if header.get(_R.SCALING_TYPE) != "yarn":
        return rope
    return rope | {
        "rope_type": "yarn",
        "factor": header.get(_R.SCALING_FACTOR),
        "original_max_position_embeddings": header.get(_R.SCALING_ORIG_CTX_LEN),
        "beta_fast": header.get(_R.SCALING_YARN_BETA_FAST, 32.0),
        "beta_slow": header.get(_R.SCALING_YARN_BETA_SLOW, 1.0),
        "attention_factor": header.get(_R.SCALING_YARN_ATTN_FACTOR),
    }


def _list_windows(header: Header, layers: int, period: int) -> list[str]:
    pattern = header.get(_A.SLIDING_WINDOW_PATTERN, period)
    slides = [(layer + 1) % pattern > 0 for layer in range(layers)] if np.ndim(pattern) == 0 else pattern
    return ["sliding_attention" if one else "full_attention" for one in slides]


def _create_olmo3(header: Header, layers: int, _: int) -> Fields:
    rope = _create_rope(header)
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "sliding_window": header.get(_A.SLIDING_WINDOW),
        "layer_types": _list_windows(header, layers, 4),
        "rope_parameters": {"full_attention": rope, "sliding_attention": plain},
    }


def _create_ministral3(header: Header, _layers: int, _dim: int) -> Fields:
    share = header.get(_R.SCALING_YARN_LOG_MUL, 0.0)
    own = {"attention_factor": None, "mscale": 1.0, "mscale_all_dim": share} if share else {}
    scaled = {"llama_4_scaling_beta": header.get(_A.TEMPERATURE_SCALE, 0.0)}
    return {"sliding_window": None, "rope_parameters": _create_rope(header) | own | scaled}


def _create_gpt_oss(header: Header, layers: int, _: int) -> Fields:
    return {
        "sliding_window": header.get(_A.SLIDING_WINDOW),
        "layer_types": _list_windows(header, layers, 2),
        "intermediate_size": header.get(_L.EXPERT_FEED_FORWARD_LENGTH),
        "attention_bias": True,
        "rope_parameters": _create_rope(header) | {"truncate": False},
    }


def _create_deepseek(header: Header, _layers: int, _dim: int) -> Fields:
    get, rotated, groups = header.get, header.get(_R.DIMENSION_COUNT), header.get(_L.EXPERT_GROUP_COUNT, 1) or 1
    rope = _create_rope(header)
    if rope["rope_type"] == "yarn":
        share = 10 * get(_R.SCALING_YARN_LOG_MUL)
        rope |= {"attention_factor": None, "mscale": share, "mscale_all_dim": share}
    key = get(_A.KEY_LENGTH_MLA, get(_A.KEY_LENGTH))
    is_second = get(_L.EXPERT_GATING_FUNC, 1) != _SIGMOID
    return {
        "head_dim": rotated,
        "num_key_value_heads": get(_A.HEAD_COUNT),
        "kv_lora_rank": get(_A.KV_LORA_RANK),
        "q_lora_rank": get(_A.Q_LORA_RANK),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": get(_A.VALUE_LENGTH_MLA, get(_A.VALUE_LENGTH)),
        "first_k_dense_replace": get(_L.LEADING_DENSE_BLOCK_COUNT, 0),
        "n_routed_experts": get(_L.EXPERT_COUNT),
        "n_shared_experts": get(_L.EXPERT_SHARED_COUNT, 0),
        "routed_scaling_factor": get(_L.EXPERT_WEIGHTS_SCALE, 1.0) or 1.0,
        "norm_topk_prob": get(_L.EXPERT_WEIGHTS_NORM, False),
        "n_group": groups,
        "topk_group": get(_L.EXPERT_GROUP_USED_COUNT, 1),
        "topk_method": "noaux_tc" if not is_second else "greedy" if groups == 1 else "group_limited_greedy",
        "rope_parameters": rope,
    }


def _create_delta(header: Header, layers: int, head_dim: int) -> Fields:
    get, interval = header.get, header.get("{arch}.full_attention_interval", 4)
    value_heads = get(_S.TIME_STEP_RANK)
    types = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)]
    share = get(_R.DIMENSION_COUNT) / head_dim
    return {
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": get(_S.INNER_SIZE) // value_heads,
        "linear_num_key_heads": get(_S.GROUP_COUNT),
        "linear_key_head_dim": get(_S.STATE_SIZE),
        "linear_conv_kernel_dim": get(_S.CONV_KERNEL),
        "layer_types": types,
        "rope_parameters": _create_rope(header) | {"partial_rotary_factor": share},
        "shared_expert_intermediate_size": get(_L.EXPERT_SHARED_FEED_FORWARD_LENGTH),
    }


def _create_gemma4(header: Header, layers: int, _: int) -> Fields:
    get, types = header.get, _list_windows(header, layers, 6)
    divisors = header.get_numbers("rope_freqs.weight")
    kv_heads = np.broadcast_to(get(_A.HEAD_COUNT_KV), layers)
    shared, widths = get(_A.SHARED_KV_LAYERS, 0), np.broadcast_to(get(_L.FEED_FORWARD_LENGTH), layers)
    first_full, first_sliding = (types.index(f"{kind}_attention") for kind in ("full", "sliding"))
    experts = get(_L.EXPERT_COUNT, 0)
    return {
        "head_dim": get(_A.KEY_LENGTH_SWA),
        "global_head_dim": get(_A.KEY_LENGTH),
        "num_key_value_heads": int(kv_heads[first_sliding]),
        "num_global_key_value_heads": int(kv_heads[first_full]),
        "attention_k_eq_v": not header.has(f"blk.{first_full}.attn_v.weight"),
        "sliding_window": get(_A.SLIDING_WINDOW),
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "intermediate_size": int(widths[0]),
        "use_double_wide_mlp": int(widths[-1]) != int(widths[0]),
        "final_logit_softcapping": get(_L.FINAL_LOGIT_SOFTCAPPING),
        "hidden_size_per_layer_input": get(_L.EMBD_LENGTH_PER_LAYER_INP, 0),
        "vocab_size_per_layer_input": header.count_rows("per_layer_token_embd.weight"),
        "enable_moe_block": experts > 0,
        "top_k_experts": get(_L.EXPERT_USED_COUNT),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": get(_R.FREQ_BASE),
                "partial_rotary_factor": 1.0 if divisors is None else float(np.mean(divisors == 1)),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": get(_R.FREQ_BASE_SWA, 10_000.0)},
        },
    }


def _create_states(header: Header, names: str) -> Fields:
    """Return the sizes of layers with Mamba-2. ``names``: of the fields, in the order below."""
    heads = header.get(_S.TIME_STEP_RANK)
    sizes = heads, header.get(_S.INNER_SIZE) // heads, header.get(_S.STATE_SIZE), header.get(_S.GROUP_COUNT, 1)
    biases = header.has("ssm_conv1d.bias"), header.has("ssm_in.bias")
    return dict(zip(names.split(), (*sizes, header.get(_S.CONV_KERNEL), *biases), strict=True))


_MAMBA_NAMES = "mamba_n_heads mamba_d_head mamba_d_state mamba_n_groups mamba_d_conv mamba_conv_bias mamba_proj_bias"


def _create_granite(header: Header, layers: int, _: int) -> Fields:
    get, experts = header.get, header.get(_L.EXPERT_COUNT, 0)
    kv_heads = np.broadcast_to(get(_A.HEAD_COUNT_KV), layers)
    return _create_states(header, _MAMBA_NAMES) | {
        "mamba_expand": get(_S.INNER_SIZE) // get(_L.EMBEDDING_LENGTH),
        "num_key_value_heads": int(kv_heads.max()),
        "layer_types": ["full_attention" if one else "linear_attention" for one in kv_heads],
        "attention_bias": header.has("attn_q.bias"),
        "position_embedding_type": "rope" if get(_R.SCALING_FINETUNED, False) else None,
        "rope_parameters": _create_rope(header),
        "shared_intermediate_size": get(_L.EXPERT_SHARED_FEED_FORWARD_LENGTH, get(_L.FEED_FORWARD_LENGTH)),
        "num_local_experts": experts,
        "embedding_multiplier": get(_L.EMBEDDING_SCALE, 1.0),
        "residual_multiplier": get(_L.RESIDUAL_SCALE, 1.0),
        "attention_multiplier": get(_A.SCALE, 1.0),
        "logits_scaling": get(_L.LOGIT_SCALE, 1.0),
    }


def _create_nemotron(header: Header, layers: int, _: int) -> Fields:
    names = "mamba_num_heads mamba_head_dim ssm_state_size n_groups conv_kernel use_conv_bias use_bias"
    get, has_experts = header.get, header.architecture == "nemotron_h_moe"
    kv_heads, widths = np.broadcast_to(get(_A.HEAD_COUNT_KV), layers), get(_L.FEED_FORWARD_LENGTH)
    part = "moe" if has_experts else "mlp"
    kinds = [
        "full_attention" if kv else part if width else "linear_attention"
        for kv, width in zip(kv_heads, widths, strict=True)
    ]
    fields = _create_states(header, names) | {
        "layers_block_type": kinds,
        "num_key_value_heads": int(kv_heads.max()),
        "intermediate_size": int(np.max(widths)),
        "layer_norm_epsilon": get(_A.LAYERNORM_RMS_EPS),
        "mlp_bias": header.has("ffn_up.bias"),
    }
    if not has_experts:
        return fields
    return fields | {
        "n_routed_experts": get(_L.EXPERT_COUNT),
        "n_shared_experts": get(_L.EXPERT_SHARED_COUNT, 1),
        "moe_shared_expert_intermediate_size": get(_L.EXPERT_SHARED_FEED_FORWARD_LENGTH),
        "moe_latent_size": get(_L.MOE_LATENT_SIZE),
        "routed_scaling_factor": get(_L.EXPERT_WEIGHTS_SCALE, 1.0),
        "norm_topk_prob": get(_L.EXPERT_WEIGHTS_NORM, False),
        "n_group": get(_L.EXPERT_GROUP_COUNT, 1),
        "topk_group": get(_L.EXPERT_GROUP_USED_COUNT, 1),
    }


def _create_falcon(header: Header, _layers: int, _dim: int) -> Fields:
    return _create_states(header, _MAMBA_NAMES) | {
        "mamba_d_ssm": header.get(_S.INNER_SIZE),
        "mamba_rms_norm": header.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "rope_parameters": _create_rope(header),
    }


def _create_mamba2(header: Header, _layers: int, _dim: int) -> Fields:
    names = "num_heads head_dim state_size n_groups conv_kernel use_conv_bias use_bias"
    ratio = header.get(_S.INNER_SIZE) // header.get(_L.EMBEDDING_LENGTH)
    return _create_states(header, names) | {"expand": ratio, "layer_norm_epsilon": header.get(_A.LAYERNORM_RMS_EPS)}
