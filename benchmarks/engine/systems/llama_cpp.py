"""llama.cpp through llama-cpp-python's low-level interface: float32 KV, one shared pool of KV cells.

The high-level ``Llama`` serves one sequence at a time. This does as llama.cpp's own parallel examples: a shared prompt
is computed once, and every sequence that starts with it shares its cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import llama_cpp

from benchmarks.engine.gguf_file import gguf_file
from benchmarks.engine.workloads import Generate, Outputs, Request

_CELLS = 16_384
_SEQUENCES = 64
_BATCH = 2048


class _LlamaCpp:
    def __init__(self, folder: Path, threads: int, weights: str) -> None:
        llama_cpp.llama_backend_init()
        file = folder if folder.suffix == ".gguf" else gguf_file(folder, weights)
        model = llama_cpp.llama_model_load_from_file(str(file).encode(), _model_params())
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {file.name}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = _CELLS, _BATCH, 512, _SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.kv_unified = True
        self._context: Any = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context of the model")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._held: dict[int, list[int]] = {}
        """Tokens whose keys and values each sequence has."""

    @contextmanager
    def session(self, *, seed: int, greedy: bool = False) -> Iterator[Generate]:
        llama_cpp.llama_memory_clear(self._memory, True)
        self._held.clear()
        sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        law = llama_cpp.llama_sampler_init_greedy() if greedy else llama_cpp.llama_sampler_init_dist(seed & 0xFFFFFFFF)
        llama_cpp.llama_sampler_chain_add(sampler, law)
        try:
            yield lambda requests: self._all(requests, sampler)
        finally:
            llama_cpp.llama_sampler_free(sampler)

    def _all(self, requests: Sequence[Request], sampler: Any) -> Outputs:
        rows, firsts = self._prefill(requests, sampler)
        outputs = [[[token] for token in tokens] for tokens in firsts]
        running = [
            (row, sample, request)
            for request, of_request, samples in zip(requests, rows, outputs, strict=True)
            for row, sample in zip(of_request, samples, strict=True)
        ]
        while running := [each for each in running if len(each[1]) < each[2].tokens]:
            new = [(sample[-1], len(request.prompt) + len(sample) - 1, row) for row, sample, request in running]
            self._decode(new, range(len(new)))
            for index, (row, sample, _) in enumerate(running):
                self._held[row].append(sample[-1])
                sample.append(llama_cpp.llama_sampler_sample(sampler, self._context, index))
        return outputs

    def _prefill(self, requests: Sequence[Request], sampler: Any) -> tuple[list[list[int]], list[list[int]]]:
        """Prefill: return a sequence for each sample and its first token. Each prompt is computed once, after its
        cached prefix.
        """
        earlier = dict(self._held)
        free = iter([row for row in range(_SEQUENCES) if row not in earlier])
        rows = [[next(free) for _ in range(request.samples)] for request in requests]
        new: list[tuple[int, int, int]] = []
        ends: list[int] = []
        for request, (first, *_) in zip(requests, rows, strict=True):
            best = max(earlier, key=lambda row: _common(earlier[row], request.prompt), default=None)
            start = 0 if best is None else min(_common(earlier[best], request.prompt), len(request.prompt) - 1)
            if start:
                llama_cpp.llama_memory_seq_cp(self._memory, best, first, 0, start)
            new += [(request.prompt[place], place, first) for place in range(start, len(request.prompt))]
            ends.append(len(new) - 1)
        firsts: list[list[int]] = [[] for _ in requests]
        for offset in range(0, len(new), _BATCH):
            chunk = new[offset : offset + _BATCH]
            here = {end - offset: index for index, end in enumerate(ends) if 0 <= end - offset < len(chunk)}
            self._decode(chunk, here)
            for place, index in here.items():
                firsts[index] = [llama_cpp.llama_sampler_sample(sampler, self._context, place) for _ in rows[index]]
        for request, (first, *others) in zip(requests, rows, strict=True):
            for other in others:
                llama_cpp.llama_memory_seq_cp(self._memory, first, other, 0, len(request.prompt))
            self._held |= {row: list(request.prompt) for row in (first, *others)}
        for row in earlier:
            llama_cpp.llama_memory_seq_rm(self._memory, row, -1, -1)
            del self._held[row]
        return rows, firsts

    def _decode(self, new: Sequence[tuple[int, int, int]], wanted: Sequence[int] | range | dict[int, int]) -> None:
        """Compute (token, position, sequence) triples; keep the logits at the indices in ``wanted``."""
        batch = self._batch
        batch.n_tokens = len(new)
        for index, (token, position, row) in enumerate(new):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = index in wanted
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")


def _model_params() -> Any:
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    return params


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def load(folder: Path, threads: int, weights: str = "F32") -> _LlamaCpp:
    """Return the engine with a GGUF file, or a checkpoint converted to one, loaded. ``weights``: GGUF's name of the
    type that a checkpoint is converted to.
    """
    return _LlamaCpp(folder, threads, weights)
