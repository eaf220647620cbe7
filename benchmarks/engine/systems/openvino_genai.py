"""OpenVINO GenAI's continuous batching: float32 KV cache, prefix caching on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.engine.openvino_model import openvino_model
from benchmarks.engine.workloads import Generate, Outputs, Request

_CACHE_GIGABYTES = 2


class _OpenVino:
    def __init__(self, folder: Path, threads: int, weights: str) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GIGABYTES
        scheduler.enable_prefix_caching = True
        exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": threads}
        source = folder if folder.suffix == ".gguf" else openvino_model(folder, weights)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(source), scheduler, "CPU", exact)

    @contextmanager
    def session(self, *, seed: int, greedy: bool = False) -> Iterator[Generate]:
        # No call empties the cache, but it is cold all the same, since no two runs share a prompt.
        yield lambda requests: self._all(requests, greedy, seed)

    def _all(self, requests: Sequence[Request], greedy: bool, seed: int) -> Outputs:
        prompts = [openvino.Tensor(np.array([request.prompt], np.int64)) for request in requests]
        configs = [_config(request, greedy, seed + index) for index, request in enumerate(requests)]
        answers = self._pipeline.generate(prompts, configs)
        return [[list(sample) for sample in answer.m_generation_ids] for answer in answers]


def _config(request: Request, greedy: bool, seed: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = request.tokens
    config.ignore_eos = True
    if not greedy:
        config.do_sample = True
        config.temperature = 1.0
        config.rng_seed = seed
        config.num_return_sequences = request.samples
    return config


def load(folder: Path, threads: int, weights: str = "float32") -> _OpenVino:
    """Return the engine with a checkpoint loaded, its weights in float32 or in int8, or a GGUF file, which it reads by
    itself.
    """
    return _OpenVino(folder, threads, weights)
