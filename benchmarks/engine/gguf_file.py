"""A checkpoint as a GGUF file for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.gguf.tensor_names import TensorNames

_EIGHT_BITS = ("token_embd.weight", "output.weight")


def gguf_file(folder: Path, weights: str = "F32") -> Path:
    """Return ``model.gguf``, or ``model-Q8_0.gguf``, beside the checkpoint's files, written on first use. All matrices
    have that type, but embeddings and output projection have at least 8 bits, as with llama.cpp's own quantizer.
    """
    path = folder / ("model.gguf" if weights == "F32" else f"model-{weights}.gguf")
    if not path.exists():
        partial = path.with_suffix(".partial")
        _write(folder, partial, weights)
        partial.rename(path)
    return path


def _write(folder: Path, path: Path, weights: str) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType, quants
    from safetensors.numpy import load_file

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, "qwen3")
    writer.add_name(folder.name)
    file_types = {"F32": LlamaFileType.ALL_F32, "MXFP4": LlamaFileType.MOSTLY_MXFP4_MOE}
    writer.add_file_type(file_types[weights] if weights in file_types else LlamaFileType[f"MOSTLY_{weights}"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    entries = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {added["id"] for added in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(entries)
    writer.add_token_types(
        [TokenType.CONTROL if index in special else TokenType.NORMAL for index in range(len(entries))]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    names = TensorNames("qwen3", config["num_hidden_layers"])
    for checkpoint_name, tensor in load_file(folder / "model.safetensors").items():
        name, _ = names.find(checkpoint_name)
        kind = GGMLQuantizationType.F32
        if tensor.ndim == 2 and weights != "F32":
            kind = GGMLQuantizationType["Q8_0" if name in _EIGHT_BITS and weights != "BF16" else weights]
            tensor = quants.quantize(tensor, kind)
        writer.add_tensor(name, tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
