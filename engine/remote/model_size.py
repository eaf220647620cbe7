"""The number of a model's weights, from the files of its folder. Free of torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

_MAX_HEADER_BYTES = 100 << 20


def count_parameters(folder: Path) -> int:
    """Return the number of weights: counted in the headers of *.safetensors, or else estimated from config.json.

    0 if neither tells. Quantized weights are counted as they are stored, which packs several into one number.
    """
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return sum(map(_count_in_file, files))
    config = folder / "config.json"
    return estimate_parameters(json.loads(config.read_text())) if config.is_file() else 0


def estimate_parameters(config: dict[str, Any]) -> int:
    """Return the number of weights of a decoder with a gated feed-forward network; 0 if the config is of another kind.

    Norms and biases, some thousandths of all, are left out.
    """
    config = config.get("text_config", config)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if not all(isinstance(config.get(name), int) for name in names):
        return 0
    hidden, wide, layers, heads, vocab = (config[name] for name in names)
    head = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return int(layers * (attention + 3 * hidden * wide) + embeddings)


def _count_in_file(path: Path) -> int:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            return 0
        header = json.loads(file.read(size))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
