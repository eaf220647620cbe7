"""``python -m benchmarks.gguf.llama_loss``: the loss of llama.cpp on texts of tokens, through llama-cpp-python.

Standard input is a JSON object with ``model``, the GGUF file, ``texts``, lists of token ids, and ``threads``. The
result is ``{"loss"}``, the mean negative log-likelihood of all tokens but the first of each text. Runs in an
environment that has llama-cpp-python and numpy alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np


def main() -> None:
    """Write the loss to standard output."""
    asked = json.load(sys.stdin)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(asked["model"].encode(), params)
    if not model:
        sys.exit(f"llama.cpp cannot load {asked['model']}")
    context, vocab = _create_context(model, max(map(len, asked["texts"])), asked["threads"])
    losses: list[float] = []
    for text in asked["texts"]:
        logits = _compute_logits(context, text, vocab)
        losses += [_loss(row, token) for row, token in zip(logits[:-1], text[1:], strict=True)]
    print(json.dumps({"loss": sum(losses) / len(losses)}))


def _loss(logits: Any, token: int) -> float:
    exact = logits.astype(np.float64) - logits[token]
    return float(np.log(np.exp(exact - exact.max()).sum()) + exact.max())


def _create_context(model: Any, longest: int, threads: int) -> tuple[Any, int]:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = longest
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        sys.exit("llama.cpp cannot make a context of the model")
    return context, llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))


def _compute_logits(context: Any, text: Sequence[int], vocab: int) -> Any:
    """Return the logits ``[tokens, vocab]``."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(len(text), 0, 1)
    batch.n_tokens = len(text)
    for index, token in enumerate(text):
        batch.token[index], batch.pos[index] = token, index
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
        batch.logits[index] = True
    if status := llama_cpp.llama_decode(context, batch):
        sys.exit(f"llama_decode returned {status}")
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(text), vocab)).copy()
    llama_cpp.llama_batch_free(batch)
    return logits


if __name__ == "__main__":
    main()
