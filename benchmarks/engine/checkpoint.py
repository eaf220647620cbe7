"""The benchmark's checkpoints: random Qwen3 weights and a tokenizer, the same on every machine."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

_VERSION = 1
"""Part of the cache folder's name; raise it whenever the files' content changes."""

END = "<|end|>"


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers that define a Qwen3 decoder with an output projection of its own (not the embedding table)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int = 32_000
    context: int = 4096


SIZES = {
    "50M": Size(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, intermediate=1536),
    "250M": Size(hidden=1024, layers=16, heads=16, kv_heads=8, head_dim=64, intermediate=3072),
    "500M": Size(hidden=1280, layers=22, heads=20, kv_heads=10, head_dim=64, intermediate=3840),
}
DEFAULT_SIZES = ("50M", "250M")


def cache_folder() -> Path:
    """Return the folder that keeps checkpoints between runs: ``$XDG_CACHE_HOME/reasoner/bench``, by default in
    ``~/.cache``.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "reasoner" / "bench"


def checkpoint(name: str, size: Size, cache: Path) -> Path:
    """Return the folder of a checkpoint under ``cache``, creating it if it is missing: config.json, float32
    model.safetensors (normal, standard deviation 0.02, seed 0; norms about one) and tokenizer.json.
    """
    return kept(name, cache, lambda folder: _make(size, folder))


def narrowed(folder: Path) -> Path:
    """Return a copy of a checkpoint in bfloat16 beside it, written on first use."""
    return kept(f"{folder.name}-bfloat16", folder.parent, lambda made: _narrow(folder, made))


def _narrow(source: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def kept(name: str, cache: Path, make: Callable[[Path], None]) -> Path:
    """Return the folder of that name under ``cache``; ``make`` writes it if it is missing."""
    folder = cache / f"{name}-v{_VERSION}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # Written elsewhere and renamed, so that an interrupted run leaves no incomplete folder of this name.
        making = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            make(making)
            making.rename(folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return folder


def _make(size: Size, folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    (folder / "config.json").write_text(json.dumps(_config(size), indent=2))
    write_tokenizer(folder, size.vocab)
    noise = np.random.Generator(np.random.PCG64(0))
    tensors = {}
    for name, shape in shapes(size):
        draw = noise.standard_normal(shape, np.float32)
        # Ones would let a compiler drop the multiplication that a real model has.
        tensors[name] = 1 + np.float32(0.1) * draw if "norm" in name else np.float32(0.02) * draw
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write the files of a tokenizer of this many tokens, the last of which is the end of sequence."""
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(vocab)))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END})
    )


def _config(size: Size) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
        "max_position_embeddings": size.context,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": size.vocab - 1,
        "dtype": "float32",
    }


def shapes(size: Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return the name and shape of every tensor."""
    query, key = size.heads * size.head_dim, size.kv_heads * size.head_dim
    yield "model.embed_tokens.weight", (size.vocab, size.hidden)
    for index in range(size.layers):
        layer = f"model.layers.{index}."
        yield layer + "input_layernorm.weight", (size.hidden,)
        yield layer + "self_attn.q_proj.weight", (query, size.hidden)
        yield layer + "self_attn.k_proj.weight", (key, size.hidden)
        yield layer + "self_attn.v_proj.weight", (key, size.hidden)
        yield layer + "self_attn.q_norm.weight", (size.head_dim,)
        yield layer + "self_attn.k_norm.weight", (size.head_dim,)
        yield layer + "self_attn.o_proj.weight", (size.hidden, query)
        yield layer + "post_attention_layernorm.weight", (size.hidden,)
        yield layer + "mlp.gate_proj.weight", (size.intermediate, size.hidden)
        yield layer + "mlp.up_proj.weight", (size.intermediate, size.hidden)
        yield layer + "mlp.down_proj.weight", (size.hidden, size.intermediate)
    yield "model.norm.weight", (size.hidden,)
    yield "lm_head.weight", (size.vocab, size.hidden)


def _tokenizer(vocab: int) -> dict[str, Any]:
    """Create a byte-level BPE: the 256 bytes, then two, three and four letters, each merged from two shorter entries.

    The last entry is the end of sequence.
    """
    pairs = [(first, second) for first, second in product(ascii_lowercase, repeat=2)]
    twos = ["".join(pair) for pair in pairs]
    merges = [*pairs, *product(twos, ascii_lowercase), *product(twos, twos)]
    alphabet = _byte_characters()
    merges = merges[: max(0, vocab - len(alphabet) - 1)]
    entries = [*alphabet, *("".join(pair) for pair in merges), END]
    end = {"id": vocab - 1, "content": END, "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [end | flags],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {entry: index for index, entry in enumerate(entries)},
            "merges": [list(pair) for pair in merges],
        },
    }


def _byte_characters() -> list[str]:
    """Return GPT-2's printable characters for the 256 bytes, in the order of the bytes: printable ones map to
    themselves, the others to the characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
