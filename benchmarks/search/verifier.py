"""A verifier with random weights: the benchmark's checkpoint with a head of two labels instead of its vocabulary."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

LABELS = 2


def verifier(policy: Path) -> Path:
    """Return the token-classification checkpoint beside ``policy``, writing it if it is missing."""
    folder = policy.with_name(f"{policy.name}-verifier")
    if not folder.exists():
        # Written elsewhere and renamed, so that an interrupted run leaves no incomplete folder of this name.
        making = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=policy.parent))
        try:
            _make(policy, making)
            making.rename(folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return folder


def _make(policy: Path, folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    config = json.loads((policy / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3ForTokenClassification"],
        "id2label": {"0": "bad", "1": "good"},
        "label2id": {"bad": 0, "good": 1},
        "classifier_dropout": 0.0,
        "reasoner_prm": {"format": "token_classification", "separator": "\n\n", "positive_label": 1},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(policy / name, folder / name)
    tensors = load_file(policy / "model.safetensors")
    del tensors["lm_head.weight"]
    noise = np.random.Generator(np.random.PCG64(1))
    tensors["score.weight"] = np.float32(0.02) * noise.standard_normal((LABELS, config["hidden_size"]), np.float32)
    tensors["score.bias"] = np.zeros(LABELS, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
