"""Measure the host's share of a decoding step: ``python -m benchmarks.gpu.host_cost --out FOLDER``.

The engine's own scheduler, cache, attention plan, batch and bookkeeping run as on a GPU, while the forward pass and the
sampling kernel return numbers made before at once. What is left is the time in which a GPU waits for the host. Branches
decode from one prompt, which they share, after beginnings of different lengths, so that some of them fill a page in
nearly every step. Times are CPU time of the engine's thread, so that other processes hardly
matter; medians of all steps. Without a GPU, waits for copies and launches are not part of them.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.decode import emulated_gpu, write_checkpoint
from benchmarks.kernels.dry_run import TINY_MODEL
from engine.attention.layer import FusedAttentionBackend
from engine.core import step as step_module
from engine.core.engine_core import EngineCore
from engine.core.step import Step, StepRunner, StepWork
from engine.device import DeviceConfig
from engine.models.config import ModelConfig, read_raw_config
from engine.models.families.read import decoder_config
from engine.models.interface import Batch, KeepState, Model
from engine.protocol.options import EngineOptions
from engine.protocol.request_checks import require_ids
from engine.protocol.types import Branch, Completion, EngineError, GenerateRequest, SamplingParams
from engine.runner.forward_gpu import GpuForward
from engine.runner.graph_pool import Replay
from engine.runner.sample_step import PendingResults
from engine.scheduler.sequence import Event, Request
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors

BATCHES = (1, 16, 64, 256)
PHASES = ("plan", "prepare", "sample", "commit", "emit")
"""Parts of a step, in this order: schedule; the batch and the attention's plan; parameters and results of the sampler;
computed tokens and full pages; the branches' new tokens, their ends and what clients receive."""
_PROMPT_TOKENS = 1024
_MAX_BEGUN = 128
"""Bound of the tokens that a branch has at the start."""
_WARM_STEPS = 40
_BYTES = 256
"""Tokens of the tokenizer of bytes."""


@dataclass(frozen=True)
class Variant:
    """Fields of the requests."""

    name: str
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    stream: bool = False


VARIANTS = (
    Variant("plain"),
    Variant("stop strings", stop=("\n\n",)),
    Variant("stop strings, log-probabilities", stop=("\n\n",), logprobs=0),
    Variant("streamed", stream=True),
)


@dataclass(frozen=True)
class HostCost:
    """Medians of the milliseconds of a step."""

    variant: str
    batch: int
    phases: dict[str, float]
    cpu: float
    """CPU time of the whole step, which is more than that of its phases."""
    wall: float


class NullModel:
    """A model whose forward pass returns zeros at once."""

    parameters = 0

    def __init__(self, config: ModelConfig, device_config: DeviceConfig, max_tokens: int) -> None:
        """``max_tokens``: most rows of a step."""
        self.config, self.device_config = config, device_config
        device = device_config.device
        self._hidden = torch.zeros(max_tokens, config.hidden_size, device=device)
        self._logits = torch.zeros(max_tokens, config.vocab_size, device=device)

    def forward(self, batch: Batch, attend: FusedAttentionBackend, keep: KeepState | None = None) -> Tensor:  # noqa: ARG002
        return self._hidden[: len(batch.tokens)]

    def embed(self, tokens: Tensor) -> Tensor:
        return self._hidden[: len(tokens)]

    def compute_logits(self, hidden: Tensor, token_ids: Any = ()) -> Tensor:  # noqa: ARG002
        return self._logits[: len(hidden)]


class NullSampler:
    """Stands in for the sampling kernel: tokens made before, other ones in each step and for each row."""

    def __init__(self, device: torch.device) -> None:
        # Letters alone: they end no branch, and each is a whole character.
        tokens = np.random.default_rng(0).integers(ord("A") - 33, ord("Z") - 33, 1 << 16)
        self._tokens = torch.from_numpy(tokens).to(device)
        self._logprobs = torch.full((1 << 16,), -1.0, dtype=torch.float64, device=device)
        self._step = 0

    def __call__(self, logits: Tensor, *_: SamplingTensors[Tensor] | NoiseKeys[Tensor]) -> tuple[Tensor, Tensor]:
        start = 61 * self._step % (1 << 15)
        self._step += 1
        return self._tokens[start : start + len(logits)], self._logprobs[: len(logits)]


class Stopwatch:
    """CPU time by phase of the steps since the last ``take``."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its time counted."""

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self._seconds[phase] += time.thread_time() - start

        return timed

    def take(self) -> dict[str, float]:
        """Return the milliseconds by phase, and start again."""
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return {phase: 1e3 * seconds for phase, seconds in taken.items()}


@contextmanager
def null_engine(folder: Path) -> Iterator[None]:
    """Give engines that are created in this context a null model and a null sampler."""

    def load(_: Path, capacity: Callable[[ModelConfig], int], device_config: DeviceConfig, **__: object) -> Model:
        config = decoder_config(read_raw_config(folder))
        return NullModel(config, device_config, capacity(config))

    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(emulated_gpu())
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        stack.enter_context(patch("engine.core.model_setup.load_model", load))
        stack.enter_context(patch("engine.runner.forward.GpuForward", _create_forward))
        stack.enter_context(patch("engine.sampling.gpu.sampling.sample", NullSampler(device)))
        yield


def _create_forward(model: Model, attend: Any, device: torch.device) -> GpuForward:
    def capture(compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        return lambda: None, compute()

    return GpuForward(model, attend, device, capture)


def measure(variant: Variant, batch: int, steps: int) -> HostCost:
    """Run ``batch`` branches of one prompt; return the medians of ``steps`` steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, TINY_MODEL)
        with null_engine(folder):
            new_tokens = _WARM_STEPS + 2 * steps + 64
            kv_tokens = 2 * _PROMPT_TOKENS + batch * (new_tokens + _MAX_BEGUN + 64)
            core = EngineCore("m", folder, EngineOptions(kv_tokens=kv_tokens, step_tokens=8192))
            submit(core, variant, batch, new_tokens)
            scheduler = core._scheduler
            while scheduler.num_waiting or any(len(one.tokens) - one.num_computed > 1 for one in scheduler.running):
                core.step()
            for _ in range(_WARM_STEPS):
                core.step()
            whole = [time_step(core) for _ in range(steps)]
            phases = time_phases(core, steps)
            if len(scheduler.running) != batch:
                raise RuntimeError(f"{len(scheduler.running)} of {batch} branches are left")
    cpu, wall = (statistics.median(times) for times in zip(*whole, strict=True))
    medians = {phase: statistics.median(one[phase] for one in phases) for phase in PHASES}
    return HostCost(variant.name, batch, medians, cpu, wall)


def submit(core: EngineCore, variant: Variant, batch: int, new_tokens: int) -> None:
    """Submit one request for ``batch`` branches of a random prompt."""
    dice = np.random.default_rng(0)
    prompt = tuple(dice.integers(0, _BYTES, _PROMPT_TOKENS).tolist())
    sampling = SamplingParams(
        temperature=0.8, top_p=0.95, ignore_eos=True, stop=variant.stop, logprobs=variant.logprobs
    )

    def receive(event: Event) -> None:
        if isinstance(event, EngineError):
            raise event

    begun = dice.integers(ord("a") - 33, ord("z") - 33, (batch, _MAX_BEGUN)).tolist()
    lengths = dice.integers(0, _MAX_BEGUN, batch).tolist()
    branches = tuple(
        Branch(seed=1, key=index, max_tokens=new_tokens, generated=tuple(begun[index][: lengths[index]]))
        for index in range(batch)
    )
    request = GenerateRequest("r", "m", prompt, branches, sampling, None, 0, None, None)
    in_flight = Request(request.request_id, receive, stream=variant.stream)
    core.model.add_branches(request, in_flight)
    core.submit(in_flight)


def time_step(core: EngineCore) -> tuple[float, float]:
    """Return the milliseconds of a step: CPU time of this thread, and wall time."""
    wall, cpu = time.perf_counter(), time.thread_time()
    core.step()
    return 1e3 * (time.thread_time() - cpu), 1e3 * (time.perf_counter() - wall)


def time_phases(core: EngineCore, steps: int) -> list[dict[str, float]]:
    """Return the milliseconds of each phase in each of some steps."""
    stopwatch = Stopwatch()
    targets: tuple[tuple[str, Any, str], ...] = (
        ("plan", core._scheduler, "schedule"),
        ("prepare", step_module, "build_batch"),
        ("prepare", core.runner, "forward"),
        ("sample", step_module, "sample_and_score"),
        ("sample", PendingResults, "read"),
        ("commit", core.runner, "_commit"),
        ("emit", core, "_append_sampled_tokens"),
    )
    forward = core.runner.forward
    with ExitStack() as stack:
        for phase, owner, name in targets:
            timed = stopwatch.wrap(phase, getattr(owner, name))
            if name == "forward":
                timed.fused_sampler, timed.kept = forward.fused_sampler, forward.kept  # type: ignore[attr-defined]
            stack.enter_context(patch.object(owner, name, timed))
        phases = []
        for _ in range(steps):
            core.step()
            phases.append(stopwatch.take())
    return phases


def measure_overlap(rounds: int = 40, width: int = 64) -> float:
    """Run a simulated tree search; return the share of steps that are launched while another is in flight.

    A branch ends after a random number of tokens and is forked at once, ``rounds`` times for each of ``width``.
    """
    dice, num_ahead, num_steps = np.random.default_rng(0), 0, 0
    real = StepRunner.launch

    def launch(runner: StepRunner, work: StepWork, now: float) -> Step:
        nonlocal num_ahead, num_steps
        num_ahead, num_steps = num_ahead + (runner.unread is not None), num_steps + 1
        return real(runner, work, now)

    with tempfile.TemporaryDirectory() as name, patch.object(StepRunner, "launch", launch):
        folder = Path(name)
        write_checkpoint(folder, TINY_MODEL)
        with null_engine(folder):
            core = EngineCore("m", folder, EngineOptions(kv_tokens=width * 2048, step_tokens=8192))
            left, ended = width * rounds, [tuple(dice.integers(0, _BYTES, 256).tolist())] * width
            while left or core.has_work:
                for prompt in ended[:left]:
                    _fork(core, (*prompt[:256], *prompt[-256:]), int(dice.integers(16, 128)), ended)
                left -= min(left, len(ended))
                ended.clear()
                core.step()
    return num_ahead / num_steps


def _fork(core: EngineCore, prompt: tuple[int, ...], max_tokens: int, ended: list[tuple[int, ...]]) -> None:
    """Submit a branch, whose tokens are added to ``ended`` at its end."""

    def receive(event: Event) -> None:
        if isinstance(event, EngineError):
            raise event
        if isinstance(event, Completion):
            ended.append((*prompt, *require_ids(event.token_ids)))

    branches = (Branch(seed=1, key=0, max_tokens=max_tokens),)
    request = GenerateRequest("r", "m", prompt, branches, SamplingParams(stop=("\n\n",)), None, 0, None, None)
    in_flight = Request(request.request_id, receive)
    core.model.add_branches(request, in_flight)
    core.submit(in_flight)


def render(costs: list[HostCost]) -> str:
    """Return the table of results."""
    lines = [
        f"| requests | branches | {' | '.join(PHASES)} | step, CPU | step, wall |",
        f"|---|---:|{'---:|' * (len(PHASES) + 2)}",
    ]
    for cost in costs:
        numbers = (*cost.phases.values(), cost.cpu, cost.wall)
        lines.append(f"| {cost.variant} | {cost.batch} | {' | '.join(f'{number:.3f}' for number in numbers)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Measure all variants and batch sizes; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.host_cost", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="BRANCHES")
    parser.add_argument("--steps", type=int, default=300, help="number of steps measured")
    parser.add_argument("--name", default="table", help="name of the table's file")
    parser.add_argument("--overlap", action="store_true", help="print the share of steps launched ahead, alone")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.overlap:
        print(f"{measure_overlap():.1%} of the steps of a tree search are launched while another is in flight")
        return 0
    costs = []
    for variant in VARIANTS:
        for batch in arguments.batches:
            costs.append(measure(variant, batch, arguments.steps))
            gc.collect()  # the engine refers to itself
            print(render(costs[-1:]).splitlines()[-1], flush=True)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        about = (
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        )
        title = f"# Host's share of a decoding step, milliseconds ({about})\n\n"
        (arguments.out / f"{arguments.name}.md").write_text(title + render(costs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
