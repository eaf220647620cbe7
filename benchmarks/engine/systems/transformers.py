"""transformers' ``generate`` on whole batches: samples of a prompt as ``num_return_sequences``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, set_seed

from benchmarks.engine.workloads import Generate, Outputs, Request


class _Generate:
    def __init__(self, model: Any) -> None:
        self._model = model

    @contextmanager
    def session(self, *, seed: int, greedy: bool = False) -> Iterator[Generate]:
        set_seed(seed)
        yield lambda requests: self._batch(requests, greedy)

    def _batch(self, requests: Sequence[Request], greedy: bool) -> Outputs:
        """Generate for a batch until its longest sequence is complete; shorter ones are cut to their length."""
        samples, prompt = requests[0].samples, len(requests[0].prompt)
        config = GenerationConfig(
            **sampling(greedy),
            max_new_tokens=max(request.tokens for request in requests),
            num_return_sequences=samples,
            pad_token_id=0,
        )
        ids = torch.tensor([request.prompt for request in requests])
        rows = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        new = rows[:, prompt:].view(len(requests), samples, -1).tolist()
        return [[row[: request.tokens] for row in rows] for request, rows in zip(requests, new, strict=True)]


def sampling(greedy: bool) -> dict[str, Any]:
    """Return the sampling options: greedy, or temperature 1 without filters; the end of sequence is ignored."""
    law = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return law | {"eos_token_id": None}


def load_model(folder: Path, threads: int) -> Any:
    """Return the checkpoint, or the GGUF file, in float32 with torch's fused attention."""
    torch.set_num_threads(threads)
    place = (folder.parent, {"gguf_file": folder.name}) if folder.suffix == ".gguf" else (folder, {})
    model = AutoModelForCausalLM.from_pretrained(
        place[0], dtype=torch.float32, attn_implementation="sdpa", **place[1]
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def load(folder: Path, threads: int) -> _Generate:
    """Return the engine with the checkpoint loaded."""
    return _Generate(load_model(folder, threads))
