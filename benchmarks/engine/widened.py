"""A small checkpoint at the cost of a large one: the same function in a larger network.

The effect of a tree search on drafters shows only on texts that repeat themselves as real ones do, and random weights
generate none. So every matrix gets more rows and columns, and the network more layers. The new units are random and
computed, but their outputs never reach the residual stream (growth that preserves the function: Chen et al. 2015,
"Net2Net").
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from benchmarks.engine.checkpoint import Size, kept, shapes


def widened(name: str, source: Path, size: Size, cache: Path) -> Path:
    """Return the folder of the checkpoint ``source``, a Qwen3 decoder with tied embeddings, grown to ``size`` and kept
    under ``cache``. ``size`` has the source's vocabulary, context, head size and query heads per key head, and no
    smaller dimension.
    """
    return kept(name, cache, lambda folder: _make(source, size, folder))


def _make(source: Path, size: Size, folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    # With more numbers, the new ones zero, the mean square is smaller.
    smaller = config["hidden_size"] / size.hidden
    config |= {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": config["rms_norm_eps"] * smaller,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    small = load_file(source / "model.safetensors")
    noise = np.random.Generator(np.random.PCG64(0))
    tensors = {}
    for name, shape in shapes(size):
        if name == "lm_head.weight":
            continue
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros(shape, np.float32)
        else:
            tensors[name] = np.float32(0.02) * noise.standard_normal(shape, np.float32)
        if name in small:
            tensors[name][tuple(map(slice, small[name].shape))] = small[name]
        if name.endswith(("layernorm.weight", "model.norm.weight")):
            tensors[name] *= np.float32(math.sqrt(smaller))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
