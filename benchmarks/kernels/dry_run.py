"""Tiny cases of every kernel on the CPU, with which the commands are tried where there is no GPU.

Every kernel is computed by its reference in torch; the times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch

from benchmarks.kernels import attention, linear, measure, norm, recurrent, sampling, step
from benchmarks.kernels.measure import Case, Run

TINY_MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "norm": lambda: norm.cases((3,), 64),
    "linear": lambda: linear.cases((1, 5), ((256, 128),)),
    "attention": lambda: attention.cases((1, 2), (96, 160), 48),
    "sampling": lambda: sampling.cases((2,), 300),
    "recurrent": lambda: recurrent.cases((2,), 9, recurrent.Sizes(1, 2, 16, 16), recurrent.Sizes(1, 2, 16, 8)),
    "step": lambda: step.cases((2,), 64, TINY_MODEL),
}


@contextmanager
def emulated_gpu() -> Iterator[None]:
    """Make ``benchmarks.kernels.measure`` run on the CPU in this context."""
    about = SimpleNamespace(name="no GPU", multi_processor_count=2, L2_cache_size=1 << 16)
    with ExitStack() as stack:
        for name, value in (
            ("DEVICE", "cpu"),
            ("_captured", lambda runs: (runs, len(runs))),
            ("_seconds", _run_all),
            ("copy_rate", lambda _: 1e9),
            ("matrix_rate", lambda *_: 1e9),
        ):
            stack.enter_context(patch.object(measure, name, value))
        stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda _: about))
        yield


def _run_all(runs: list[Run], calls: int) -> float:
    """Return the mean seconds of a run."""
    start = time.perf_counter()
    for run in runs:
        run()
    return (time.perf_counter() - start) / calls
