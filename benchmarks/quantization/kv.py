"""``python -m benchmarks.quantization.kv``: the loss by quantized keys and values, their bytes, and a step's time.

The divergence of the next-token distribution from that with float32 keys and values, on solutions of the bundled model,
and on the pages of docs/explanation for SmolLM2-135M. Keys and values are rounded as they are written into the cache.
The public model's weights are those of its GGUF file in float32, so that rounded activations add no noise of their own.
The steps are those of ``benchmarks.engine.kv_types``.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import reasoner
from benchmarks.engine.kv_types import LENGTHS, measure_steps
from benchmarks.gguf.fidelity import TEXT, WINDOW, open_float32
from benchmarks.quantization.quality import open_model
from benchmarks.quantization.texts import texts
from benchmarks.real.tasks import find_model
from engine.attention.layer import LayerAttentionConfig
from engine.cache.key_pool import kv_bytes_per_token
from engine.device import CPU, KV_DTYPES, select_kv_dtype
from engine.models.interface import Batch, Model
from engine.quantization.calibration import DenseAttention
from engine.text.tokenizer import Tokenizer
from kernels.quantize import QUANTIZED, dequantize_vectors, quantize_vectors

POLICY = Path(reasoner.__file__).parent / "bundled" / "policy"
Text = tuple[Sequence[int], int]
"""Token ids, and the first index that counts (1 or more)."""


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one type on one model."""

    model: str
    kv_dtype: str
    bytes_per_token: int
    """Bytes of a token's keys and values in all layers."""
    divergence: float
    """Mean Kullback-Leibler divergence from the distribution with float32 keys and values, in nats a token."""
    agreement: float
    """Share of the tokens whose likeliest successor is the same."""


class RoundedAttention(DenseAttention):
    """Attention to keys and values that were stored in a dtype of the cache."""

    def __init__(self, layers: Sequence[LayerAttentionConfig], dtype: torch.dtype) -> None:
        super().__init__(layers)
        self._dtype = dtype

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._dtype in QUANTIZED:
            k, v = (dequantize_vectors(*quantize_vectors(x, self._dtype)) for x in (k, v))
        return super().__call__(layer, q, k, v)


def measure_loss(name: str, model: Model, items: Sequence[Text]) -> list[Row]:
    """Compare every type with float32 on some texts."""
    layers = model.config.attention
    dtypes = {kv_dtype: select_kv_dtype(kv_dtype, CPU) for kv_dtype in KV_DTYPES}
    divergences, agreed, num_tokens = dict.fromkeys(KV_DTYPES, 0.0), dict.fromkeys(KV_DTYPES, 0), 0
    for tokens, start in items:
        num_tokens += len(tokens) - start
        exact = torch.empty(0)
        for kv_dtype, dtype in dtypes.items():
            ours = _log_probs(model, tokens, RoundedAttention(layers, dtype))[start - 1 : -1]
            exact = ours if kv_dtype == "auto" else exact
            divergences[kv_dtype] += float((exact.exp() * (exact - ours)).sum())
            agreed[kv_dtype] += int((exact.argmax(-1) == ours.argmax(-1)).sum())
    return [
        Row(
            name,
            kv_dtype,
            sum(kv_bytes_per_token(layer.shape, dtype) for layer in layers),
            divergences[kv_dtype] / num_tokens,
            agreed[kv_dtype] / num_tokens,
        )
        for kv_dtype, dtype in dtypes.items()
    ]


@torch.inference_mode()
def _log_probs(model: Model, tokens: Sequence[int], attention: DenseAttention) -> Tensor:
    batch = Batch(torch.tensor(tokens), torch.arange(len(tokens)))
    return torch.log_softmax(model.compute_logits(model.forward(batch, attention)).double(), dim=-1)


def measure(file: Path, num_texts: int, num_windows: int) -> dict[str, Any]:
    """Return the results document."""
    policy = open_model(POLICY)
    tokenizer = Tokenizer(POLICY, policy.config.vocab_size)
    solutions = [(one.tokens, one.prompt) for one in texts(tokenizer, "heldout", num_texts)]
    rows = measure_loss("the bundled policy", policy, solutions)
    with tempfile.TemporaryDirectory(prefix="reasoner-") as scratch:
        folder = open_float32(file, Path(scratch))
        public = open_model(folder)
        text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(TEXT.glob("*.md")))
        ids = Tokenizer(folder, public.config.vocab_size).encode(text)[: WINDOW * num_windows]
        windows = [(ids[start : start + WINDOW], 1) for start in range(0, len(ids), WINDOW)]
        rows += measure_loss("SmolLM2-135M-Instruct", public, windows)
    return {
        "machine": platform.machine(),
        "file": file.name,
        "texts": num_texts,
        "windows": num_windows,
        "rows": [asdict(row) for row in rows],
        "steps": {str(length): measure_steps(length) for length in LENGTHS},
    }


def markdown(results: dict[str, Any]) -> str:
    """Return both Markdown tables."""
    lines = [
        "| model | keys and values | bytes a token | KL divergence (nats) | same likeliest token |",
        "|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['model']} | {_name(row['kv_dtype'])} | {row['bytes_per_token']:,} | {row['divergence']:.2g} "
        f"| {row['agreement'] * 100:.1f} % |"
        for row in results["rows"]
    ]
    columns = " | ".join(f"{int(length):,} tokens each" for length in results["steps"])
    lines += ["", f"| keys and values | {columns} |", "|---|" + "---:|" * len(results["steps"])]
    for kv_dtype in KV_DTYPES:
        times = " | ".join(f"{times[kv_dtype]:.1f} ms" for times in results["steps"].values())
        lines.append(f"| {_name(kv_dtype)} | {times} |")
    return "\n".join([*lines, ""])


def _name(kv_dtype: str) -> str:
    return "float32" if kv_dtype == "auto" else kv_dtype


def main() -> None:
    """Measure on one thread, and write results.json and table.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantization.kv", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the installed SmolLM2")
    parser.add_argument("--out", type=Path, help="folder for results.json and table.md")
    parser.add_argument("--texts", type=int, default=100, help="solutions for the bundled policy (%(default)s)")
    parser.add_argument("--windows", type=int, default=8, help=f"windows of {WINDOW} tokens (%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(arguments.model or find_model(), arguments.texts, arguments.windows)
    table = markdown(results)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        (arguments.out / "table.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
