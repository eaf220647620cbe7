"""The fields that a ``config.json`` of the Llama family may have.

Every field is either read, or known not to influence inference, or unsupported: a field that is not read could ask for
a feature that is not computed here. Such a model is left to transformers' own code, or refused (``--strict-config``).
"""

from __future__ import annotations

from typing import Any

from engine.protocol.types import EngineError

READ = {
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"),
    *("tie_word_embeddings", "id2label", "num_labels", "eos_token_id", "token_classification_bias"),
    "quantization_config",
}
"""Fields that are read for every family."""

WITHOUT_INFLUENCE = {
    # Description and origin of the file. Code that ``auto_map`` names is never run.
    *("auto_map", "model_type", "transformers_version", "torch_dtype", "dtype"),
    "kind",  # of drafter
    *("is_llama_config", "transformers.js_config", "model_max_length", "max_sequence_length", "seq_length"),
    *("unsloth_version", "unsloth_fixed", "name_or_path"),
    *("label2id", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class", "prefix"),
    *("bos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id"),
    *("bos_token", "eos_token", "pad_token", "decoder_start_token_id", "keys_to_ignore_at_inference"),
    # Settings of transformers' own inference.
    *("use_cache", "cache_implementation", "attn_implementation", "use_flash_attn", "pretraining_tp"),
    *("return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("torchscript", "tf_legacy_loss", "use_bfloat16", "chunk_size_feed_forward", "is_decoder"),
    # How the weights were quantised while a fine-tune was trained; those of the file have ``quantization_config``.
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    # Training only.
    *("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout"),
    *("residual_dropout", "classifier_dropout", "classifier_dropout_prob", "summary_dropout_prob"),
    *("router_aux_loss_coef", "router_jitter_noise", "gradient_checkpointing", "use_gradient_checkpointing"),
    # Generation settings of older configs; requests have their own.
    *("max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("temperature", "top_k", "top_p", "typical_p", "diversity_penalty", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences"),
}
"""Fields that do not change what any family computes."""

_FIXED: dict[str, Any] = {
    **{"is_causal": True, "full_attn_mod": 1, "interpolate_factor": 1, "activation": "swiglu"},
    **{"moe_layer_freq": 1, "normalization_function": "rmsnorm", "mamba_use_mlp": True},
}
"""Fields that are accepted only at the value that changes nothing."""


class UnsupportedField(EngineError):
    """A field, or a value of one, asks for something that no model defined here computes."""


def refuse_unknown(fields: dict[str, Any], known_fields: set[str]) -> None:
    """Raise ``UnsupportedField`` for a field that is not in ``known_fields`` and asks for something."""
    for name, value in fields.items():
        if name in _FIXED:
            if value is not None and value != _FIXED[name]:
                raise UnsupportedField(f"{name} is {value!r}; only {_FIXED[name]!r} is supported")
        # A field that is off, empty or zero asks for nothing; names with an underscore are bookkeeping.
        elif name not in known_fields and value and not name.startswith(("reasoner_", "_")):
            raise UnsupportedField(f"{name} is not supported for this architecture (its value is {value!r})")
