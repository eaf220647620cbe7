"""vLLM on the CPU, in-process: float32, prefix caching on, as many sequences at once as our engine takes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# vLLM reads them when it is imported. Without the first its threads are bound to cores, which those of others may use.
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

# isort: split
import torch
from vllm import LLM, SamplingParams

from benchmarks.engine.workloads import Generate, Outputs, Request

_CONTEXT = 4096
_SEQUENCES = 64


class _Vllm:
    def __init__(self, folder: Path) -> None:
        self._engine: Any = LLM(
            str(folder),
            dtype="float32",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            max_model_len=_CONTEXT,
            max_num_seqs=_SEQUENCES,
        )

    @contextmanager
    def session(self, *, seed: int, greedy: bool = False) -> Iterator[Generate]:
        self._engine.reset_prefix_cache()
        yield lambda requests: self._all(requests, greedy, seed)

    def _all(self, requests: Sequence[Request], greedy: bool, seed: int) -> Outputs:
        sampling = [
            SamplingParams(
                n=request.samples,
                temperature=0.0 if greedy else 1.0,
                seed=None if greedy else (seed + index) & 0x7FFFFFFF,
                max_tokens=request.tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for index, request in enumerate(requests)
        ]
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        answers = self._engine.generate(prompts, sampling, use_tqdm=False)
        return [[list(sample.token_ids) for sample in answer.outputs] for answer in answers]


def load(folder: Path, threads: int) -> _Vllm:
    """Return the engine with the checkpoint loaded."""
    torch.set_num_threads(threads)
    return _Vllm(folder)
