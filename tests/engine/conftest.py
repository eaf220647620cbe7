"""Random-weight checkpoints with a small byte-level tokenizer, made once per run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.seeds import shift

Checkpoints = Callable[[str], Path]

# A GPU machine may have torch and transformers only; everything but the server runs there.
_SERVER = ["server", "client", "serving.py"]
collect_ignore = [] if find_spec("fastapi") and find_spec("httpx") else _SERVER

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = ["step one: add 3 and 4 to get 7.\n\n", "so the answer is \\boxed{42}\n", "naïve café 你好 🙂🙃 x = 1 + 30"]


@pytest.fixture(autouse=True)
def _no_drafter_fails_unnoticed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which a drafter fails unexpectedly, since the engine continues without it."""
    yield
    assert not [record for record in caplog.get_records("call") if record.name == "engine.speculation.speculator"]


_SIZES = {
    "vocab_size": 400,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
}


_LONG = [1.0 + 0.7 * pair for pair in range(4)]
_YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_LATENT = {
    "head_dim": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 6,
}
_GROUPS = {
    **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 40, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7},
}
_INDEXER = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 10}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "sliding_window": 20,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 400,
    "num_kv_shared_layers": 0,
}
_LLAMA4 = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 16,
    "intermediate_size_mlp": 64,
    "num_hidden_layers": 4,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_SHARED = {"shared_expert_intermediate_size": 40}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_JAMBA = {
    "num_experts": 2,
    "use_mamba_kernels": False,
    "mamba_d_state": 8,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
_FALCON_H1 = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
_FALCON_H1_FACTORS = {
    **{"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2, "embedding_multiplier": 3.0},
    **{"lm_head_multiplier": 0.5, "mlp_multipliers": [1.4, 0.6], "key_multiplier": 0.8, "ssm_in_multiplier": 1.1},
    **{"attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7, "ssm_out_multiplier": 0.6},
    **{"ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.3], "time_step_limit": (0.2, 2.0)},
}
_MAMBA = {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_NEMOTRON = {"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16}
_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}

# transformers' class, and the config fields that it has beside _SIZES. Windows, soft caps and original contexts are
# small, so that the tests' texts exceed them.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rope_theta": 5000.0, "initializer_range": 0.4}),
    "llama_bias": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama_linear": ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 700.0}),
    "llama_dynamic": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama_llama3": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama_classify": ("LlamaForTokenClassification", {"num_labels": 3, "initializer_range": 0.4}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 20}),
    "mistral_full": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral_classify": ("MistralForTokenClassification", {"sliding_window": 20}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 20}),
    "mixtral_classify": ("MixtralForTokenClassification", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2_yarn": (
        "Qwen2ForCausalLM",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "qwen2_classify": ("Qwen2ForTokenClassification", {"num_labels": 4, "token_classification_bias": False}),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "initializer_range": 0.4}),
    "qwen3_wide": (
        "Qwen3ForCausalLM",
        {"tie_word_embeddings": True, "initializer_range": 0.4, "head_dim": 32},
    ),
    "qwen3_window": (
        "Qwen3ForCausalLM",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 2.0,
                "mscale_all_dim": 0.5,
                "beta_fast": 4,
                "beta_slow": 1.5,
                "truncate": False,
            },
        },
    ),
    "qwen3_classify": ("Qwen3ForTokenClassification", {"num_labels": 2, "initializer_range": 0.4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _MOE | {"use_sliding_window": True, "sliding_window": 20}),
    "qwen3_moe_mixed": (
        "Qwen3MoeForCausalLM",
        _MOE | {"norm_topk_prob": True, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3_moe_classify": ("Qwen3MoeForTokenClassification", _MOE),
    "phi3": ("Phi3ForCausalLM", {"head_dim": None, "partial_rotary_factor": 0.5, "sliding_window": 20}),
    "phi3_longrope": (
        "Phi3ForCausalLM",
        {
            "head_dim": None,
            "original_max_position_embeddings": 32,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": _LONG},
        },
    ),
    "phi3_classify": ("Phi3ForTokenClassification", {"head_dim": None}),
    "gemma2": ("Gemma2ForCausalLM", _CAPS | {"sliding_window": 20, "query_pre_attn_scalar": 5}),
    "gemma2_classify": ("Gemma2ForTokenClassification", _CAPS | {"sliding_window": 20, "attention_bias": True}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "sliding_window_pattern": 3,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 40,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_theta": 9000.0,
            "rope_local_base_freq": 500.0,
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
    ),
    "olmo3": (
        "Olmo3ForCausalLM",
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 900.0},
                "full_attention": _YARN | {"attention_factor": 1.2},
            },
        },
    ),
    "ministral3": ("Ministral3ForCausalLM", {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.5}}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 20,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.7,
            "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 10}),
    "gemma4": ("Gemma4ForCausalLM", _GEMMA4),
    "gemma4_shared": (
        "Gemma4ForCausalLM",
        _GEMMA4
        | {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "num_kv_shared_layers": 3,
            "attention_k_eq_v": True,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4_moe": (
        "Gemma4ForCausalLM",
        _GEMMA4
        | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
    ),
    "gemma4_plain": ("Gemma4ForCausalLM", _GEMMA4 | {"hidden_size_per_layer_input": 0}),
    # Not defined here, so the transformers backend runs it.
    "olmo2": ("Olmo2ForCausalLM", {}),
    "starcoder2": ("Starcoder2ForCausalLM", {"head_dim": None, "sliding_window": 20}),
    "gpt_neox": ("GPTNeoXForCausalLM", {"head_dim": None, "num_key_value_heads": None}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256}),
    "cohere": ("CohereForCausalLM", {"head_dim": None, "logit_scale": 0.3}),
    "stablelm": ("StableLmForCausalLM", {"head_dim": None}),
    # One vector a token in the cache, of 24 numbers, which no kernel is compiled for, and of 32.
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        _LATENT
        | _GROUPS
        | {"head_dim": 8, "q_lora_rank": None, "topk_method": "group_limited_greedy", "mlp_bias": True},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        _LATENT
        | _GROUPS
        | {
            "kv_lora_rank": 24,
            "attention_bias": True,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3},
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", _LATENT | _GROUPS | {"kv_lora_rank": 24, "rope_interleave": False}),
    # Chunks, two calls of attention in a layer.
    "llama4": ("Llama4ForCausalLM", _LLAMA4),
    "diffllama": ("DiffLlamaForCausalLM", {}),
    # Layers with states: delta rule, short convolution, two kinds of state-space layers, beside attention in one layer.
    "qwen3_next": ("Qwen3NextForCausalLM", _MOE | _SHARED | _DELTA | {"num_hidden_layers": 4}),
    "qwen3_5": ("Qwen3_5ForCausalLM", _DELTA | _MIXED),
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM",
        _MOE | _SHARED | _DELTA | _MIXED,
    ),
    "jamba": ("JambaForCausalLM", _JAMBA),
    "mamba2": ("Mamba2ForCausalLM", {"num_heads": 12, "head_dim": 8, "state_size": 8, "expand": 2, "n_groups": 2}),
    "falcon_h1": ("FalconH1ForCausalLM", _FALCON_H1),
    "falcon_h1_norm": ("FalconH1ForCausalLM", _FALCON_H1 | _FALCON_H1_FACTORS),
    "bamba": ("BambaForCausalLM", _MAMBA | {"attn_layer_indices": [1], "attention_bias": True, "mlp_bias": True}),
    "granite_hybrid": (
        "GraniteMoeHybridForCausalLM",
        _MAMBA
        | {
            "layer_types": ["mamba", "attention", "mamba"],
            "num_hidden_layers": 3,
            "shared_intermediate_size": 64,
            "intermediate_size": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "tie_word_embeddings": True,
        },
    ),
    "granite_hybrid_dense": (
        "GraniteMoeHybridForCausalLM",
        _MAMBA
        | {
            "layer_types": ["attention", "mamba"],
            "shared_intermediate_size": 64,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "time_step_limit": (0.3, 1.5),
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        _NEMOTRON
        | {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"], "num_hidden_layers": 5}
        | {"use_bias": True, "mlp_bias": True, "time_step_min": 0.4},
    ),
    "nemotron_h_moe": (
        "NemotronHForCausalLM",
        _NEMOTRON
        | {"layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"], "num_hidden_layers": 5}
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"moe_shared_expert_intermediate_size": 64, "moe_latent_size": 24, "routed_scaling_factor": 1.7},
    ),
}
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32ForCausalLM", _LATENT | _GROUPS | _INDEXER | {"kv_lora_rank": 24}),
    "glm_moe_dsa": (
        "GlmMoeDsaForCausalLM",
        _LATENT | _GROUPS | _INDEXER | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    ),
}
"""Models with sparse attention, which leaves tokens out of a text of more than 16. Where an indexer's scores nearly tie
rounding decides which, and all that follows differs: only tests that pass over such texts compare them with others."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """``checkpoints(kind)`` returns the folder of a checkpoint of one of ``MODELS``."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            save_checkpoint(kind, made[kind])
        return made[kind]

    return make


def save_checkpoint(kind: str, folder: Path) -> None:
    architecture, options = (MODELS | SPARSE)[kind]
    save_random_model(architecture, {"initializer_range": 0.3} | options, folder)


def save_random_model(architecture: str, options: dict[str, Any], folder: Path) -> None:
    """Save a random checkpoint of any transformers class, with norms and biases away from their initial values."""
    torch.manual_seed(shift(7))
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(folder)
    common = _SIZES | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": None, "bos_token_id": None}
    model_class = getattr(transformers, architecture)
    chosen = {name: value for name, value in (common | options).items() if value is not None or name not in _SIZES}
    model = model_class(model_class.config_class(**chosen))
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *list_corrections(model)]:
            if "norm" in name or "ln_" in name or name.endswith("scale"):
                weight.uniform_(0.5, 1.5)
            elif "bias" in name:
                weight.normal_(0, 0.3)
            elif weight.ndim == 3 or "gate.weight" in name:  # experts and routers
                weight.normal_(0, 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"reasoner_prm": {"kind": "test"}}))


def list_corrections(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return what routers add to experts' scores, which transformers keeps in buffers."""
    return [(name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name]


def small_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE)
