"""``python -m benchmarks.gguf.dequantise FILE FOLDER``: write transformers' reading of a GGUF file in float32."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def main() -> None:
    """Write config.json and model.safetensors; ``save_pretrained`` refuses models that were read from GGUF."""
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    fields = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    fields.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = model.state_dict()
    if fields["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
