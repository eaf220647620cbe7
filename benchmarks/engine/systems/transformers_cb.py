"""transformers' continuous batching, through the manager below ``generate_batch``, so that requests may differ in
length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.engine.systems.transformers import load_model, sampling
from benchmarks.engine.workloads import Generate, Outputs, Request

_PAGES = 64
"""Number of pages of 256 tokens: more than the largest workload needs."""
_PATIENCE = 600.0


class _ContinuousBatching:
    def __init__(self, model: Any) -> None:
        self._model = model

    @contextmanager
    def session(self, *, seed: int, greedy: bool = False) -> Iterator[Generate]:
        manager = self._model.continuous_batching_context_manager(
            generation_config=GenerationConfig(**sampling(greedy)),
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=_PAGES, max_batch_tokens=2048, seed=seed),
        )
        with manager as running:
            yield lambda requests: _all(running, requests)


def _all(manager: Any, requests: Sequence[Request]) -> Outputs:
    # Samples of one prompt are forks of its first one: the manager computes the prompt once.
    manager.num_return_sequences = requests[0].samples
    parents = [manager.add_request(list(one.prompt), max_new_tokens=one.tokens) for one in requests]
    outputs: dict[str, list[list[int]]] = {parent: [] for parent in parents}
    for _ in range(sum(request.samples for request in requests)):
        result = manager.get_result(timeout=_PATIENCE)
        if result is None or result.error is not None:
            raise RuntimeError(f"continuous batching failed: {'no answer' if result is None else result.error}")
        outputs[result.request_id.split("__child#")[0]].append(list(result.generated_tokens))
    return list(outputs.values())


def load(folder: Path, threads: int) -> _ContinuousBatching:
    """Return the engine with the checkpoint loaded."""
    return _ContinuousBatching(load_model(folder, threads))
