"""Time the engine's decoding step on a GPU: the whole step, the GPU's share of it, and its largest kernels.

``python -m benchmarks.gpu.decode [--kv fp8] [--weights int4] [--hybrid] BATCH:CONTEXT[:SHARED] ...``; an 8B Llama's
shapes with random weights, or those of a model of that size in which three of four layers have a gated delta rule
(Qwen3.5), run by the engine's own scheduler, cache, graphs and sampler. With ``--tiny`` it runs anywhere, as a test of
itself. The floor of a step is the time in which the GPU copies as many bytes as it must read at least.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernels import step as shapes
from benchmarks.kernels.dry_run import TINY_MODEL
from benchmarks.kernels.measure import copy_rate
from engine.core.engine_core import EngineCore
from engine.device import DeviceConfig
from engine.models.config import ModelConfig, RawConfig, read_raw_config
from engine.models.families.read import decoder_config
from engine.models.interface import Model
from engine.models.load import choose_class
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, EngineError, GenerateRequest, SamplingParams
from engine.scheduler.sequence import Event, Request
from engine.weights.formats.registry import MatrixReader
from kernels.common.int4 import GROUP


class Format(NamedTuple):
    """Weights of the layers' matrices; the table of tokens and the head have 16 bits in each."""

    read: MatrixReader
    bits: float
    """Bits of a weight with its scales and zeros."""


FORMATS: Mapping[str, Format] = {
    "bf16": Format(shapes.read_whole, 16),
    "fp8": Format(shapes.read_fp8, 8),
    "int4": Format(shapes.read_int4, 4 + 24 / shapes.GROUP),
}
Sizes = Mapping[str, Any]
"""Fields of ``config.json``."""
SIZES: Sizes = shapes.SIZES | {"num_hidden_layers": 32}
_NEW_TOKENS = 400
DRAFT_LENGTH = 8
"""Maximum depth of a draft, the default of the engine."""
_WARM_STEPS, _STEPS, _PROFILED = 40, 100, 5
_TINY_STEPS = 4
_TOP = 14
"""Number of kernels that are listed."""


@dataclass(frozen=True)
class Work:
    """Sequences that are decoded together."""

    batch: int
    context: int
    """Tokens of each sequence's prompt."""
    shared: int = 0
    """Tokens at the start that all prompts have in common."""

    @classmethod
    def parse(cls, text: str) -> Work:
        return cls(*map(int, text.split(":")))

    @property
    def prompt_tokens(self) -> int:
        """Tokens to compute, if shared ones are computed once."""
        return self.batch * (self.context - self.shared) + self.shared


def main(argv: list[str] | None = None) -> int:
    """Time every case; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.decode", description=__doc__)
    parser.add_argument("cases", nargs="+", type=Work.parse, metavar="BATCH:CONTEXT[:SHARED]")
    parser.add_argument("--kv", default="auto", help="dtype of the KV cache")
    parser.add_argument("--weights", choices=FORMATS, default="bf16", help="type of the layers' weights")
    parser.add_argument("--hybrid", action="store_true", help="most layers have states instead of keys")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on whatever device there is")
    arguments = parser.parse_args(argv)
    sizes: Sizes = TINY_MODEL if arguments.tiny else SIZES
    if arguments.hybrid:
        sizes = add_states(sizes, tiny=arguments.tiny)
    copy = copy_rate(torch.device("cuda")) if torch.cuda.is_available() else float("nan")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_checkpoint(folder, sizes)
        stack.enter_context(random_weights(FORMATS[arguments.weights].read))
        if not torch.cuda.is_available():
            stack.enter_context(emulated_gpu())
        for work in arguments.cases:
            floor = count_bytes(work, sizes, weights=arguments.weights, kv_dtype=arguments.kv) / copy
            print(time_steps(folder, work, arguments.kv, floor, tiny=arguments.tiny), flush=True)
            free_memory()
    return 0


def add_states(sizes: Sizes, *, tiny: bool) -> Sizes:
    """Return the fields of a model in which every fourth layer, of a tiny one every second, has attention."""
    num_layers, interval, (heads, dim) = (
        int(sizes["num_hidden_layers"]),
        2 if tiny else 4,
        (2, 16) if tiny else (16, 128),
    )
    kinds = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)]
    delta = {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": 2 * heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_conv_kernel_dim": 4,
    }
    return {**sizes, **delta, "layer_types": kinds, "architectures": ["Qwen3_5ForCausalLM"]}


def write_checkpoint(folder: Path, sizes: Sizes) -> None:
    """Write the config and a tokenizer of bytes into a folder that has no weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 5e5, **sizes}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **fields}))


@contextmanager
def random_weights(read: MatrixReader) -> Iterator[None]:
    """Give engines that are created in this context random weights."""

    def load(folder: Path, capacity: Callable[[ModelConfig], int], device_config: DeviceConfig, **_: object) -> Model:
        config = decoder_config(read_raw_config(folder))
        context = min(config.max_context, capacity(config))
        return choose_class(config)(config, shapes.RandomWeights(device_config.device), context, read, device_config)

    with patch("engine.core.model_setup.load_model", load):
        yield


@contextmanager
def emulated_gpu() -> Iterator[None]:
    """Make engines that are created in this context run their GPU code on the CPU."""
    from tests.engine.gpu import EMULATED_GPU, EmulatedPool, emulated_forward

    with (
        patch("engine.runner.forward.GpuForward", emulated_forward),
        patch("engine.core.model_setup.select_device", lambda *_, **__: EMULATED_GPU),
        patch("engine.speculation.drafters.device_levels.GraphPool", EmulatedPool),
        patch("engine.core.step.warm_up", lambda *_, **__: None),
    ):
        yield


def count_bytes(work: Work, sizes: Sizes, *, weights: str, kv_dtype: str) -> int:
    """Return the bytes that a step must read at least: all weights once, and each key and value once. Each state is
    read and written."""
    fields = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, **sizes}
    config = decoder_config(RawConfig(Path(), fields, {}))
    hidden, head_dim, layers = config.hidden_size, config.head_dim, len(config.attention)
    query, key = config.heads * head_dim, 2 * config.kv_heads * head_dim
    count = layers * hidden * ((2 if config.delta is None else 3) * query + key)
    if config.delta is not None:
        values = config.delta.value_heads * config.delta.value_dim
        count += len(config.states) * hidden * (sum(config.delta.projections.values()) + values)
    count += config.num_layers * hidden * 3 * config.intermediate
    kv_bytes = {"auto": 2, "int4": 0.5 + 2 / GROUP}.get(kv_dtype, 1 + 4 / head_dim)
    tokens = work.prompt_tokens + work.batch * (_WARM_STEPS + _STEPS // 2)
    matrices = count * FORMATS[weights].bits / 8 + 2 * config.vocab_size * hidden
    return int(matrices + tokens * layers * key * kv_bytes) + 2 * work.batch * config.state_bytes


def time_steps(folder: Path, work: Work, kv_dtype: str, floor: float, *, tiny: bool) -> str:
    """Return a line with the times of a step, and lines with the kernels that take most of it."""
    start = time.perf_counter()
    core = create_core(folder, [work], kv_dtype, tiny=tiny)
    loaded = time.perf_counter()
    fill(core, work)
    filled = time.perf_counter()
    times = time_decoding(core, tiny=tiny)
    median = statistics.median(times)
    name = f"{work.batch} × {work.context}" + (f", {work.shared} of them shared" if work.shared else "")
    line = (
        f"{name}: loaded in {loaded - start:.1f} s; prompts {work.prompt_tokens / (filled - loaded):.0f} tokens/s "
        f"with compilation; step {median:.2f} ms (90 % {times[len(times) * 9 // 10]:.2f}, "
        f"longest {times[-1]:.2f}), {1e3 * work.batch / median:.0f} tokens/s"
    )
    if not torch.cuda.is_available():
        return line
    kernels = profile_kernels(core)
    busy = sum(ms for ms, _, _ in kernels)
    line += f"; floor {1e3 * floor:.2f} ms, {median / (1e3 * floor):.2f} × it; GPU idle {median - busy:.2f} ms"
    return "\n".join([line, *describe_kernels(kernels)])


def create_core(
    folder: Path,
    works: Sequence[Work],
    kv_dtype: str,
    *,
    tiny: bool,
    draft: str = "off",
    new_tokens: int = _NEW_TOKENS,
) -> EngineCore:
    """Return an engine whose cache holds the largest of the works."""
    kv_tokens = max(work.prompt_tokens + work.batch * (new_tokens + 112) + 4096 for work in works)
    options = EngineOptions(
        kv_tokens=kv_tokens,
        step_tokens=512 if tiny else 8192,
        kv_dtype=kv_dtype,
        draft=draft,
        draft_length=DRAFT_LENGTH,
    )
    core = EngineCore("m", folder, options)
    synchronize()
    return core


def fill(core: EngineCore, work: Work, new_tokens: int = _NEW_TOKENS) -> None:
    """Submit sequences and compute their prompts."""
    submit(core, work, new_tokens)
    scheduler = core._scheduler
    while scheduler.num_waiting or any(len(one.tokens) - one.num_computed > 1 for one in scheduler.running):
        core.step()
    synchronize()


def time_decoding(core: EngineCore, *, tiny: bool) -> list[float]:
    """Return the milliseconds of some steps after others that warm up, shortest first; of few steps if ``tiny``."""
    for _ in range(_TINY_STEPS if tiny else _WARM_STEPS):
        core.step()
    synchronize()
    return sorted(time_step(core) for _ in range(_TINY_STEPS if tiny else _STEPS))


def free_memory() -> None:
    """Free the memory of engines that nothing refers to."""
    gc.collect()  # an engine refers to itself
    torch.cuda.empty_cache()


def submit(core: EngineCore, work: Work, new_tokens: int = _NEW_TOKENS) -> None:
    """Submit requests with random prompts, which end at no token."""
    dice = np.random.default_rng(0)
    shared = dice.integers(0, 256, work.shared).tolist()
    sampling = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True)

    def fail(event: Event) -> None:
        if isinstance(event, EngineError):
            raise event

    for index in range(work.batch):
        prompt = (*shared, *dice.integers(0, 256, work.context - work.shared).tolist())
        branches = (Branch(seed=1, key=index, max_tokens=new_tokens),)
        request = GenerateRequest(f"r{index}", "m", prompt, branches, sampling, None, 0, None, None)
        in_flight = Request(request.request_id, fail)
        core.model.add_branches(request, in_flight)
        core.submit(in_flight)


def time_step(core: EngineCore) -> float:
    """Return the milliseconds of a step, which ends with its tokens on the host."""
    start = time.perf_counter()
    core.step()
    return 1e3 * (time.perf_counter() - start)


def profile_kernels(core: EngineCore) -> list[tuple[float, float, str]]:
    """Return milliseconds and launches per step of each kernel, largest first."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(_PROFILED):
            core.step()
        synchronize()
    return sorted(
        (
            (event.self_device_time_total / 1e3 / _PROFILED, event.count / _PROFILED, event.key)
            for event in profiler.key_averages()
            if event.device_type == DeviceType.CUDA and event.self_device_time_total
        ),
        reverse=True,
    )


def describe_kernels(kernels: Sequence[tuple[float, float, str]]) -> list[str]:
    """Return a line for each of the kernels that take most of a step."""
    return [f"    {ms:8.3f} ms {count:6.0f} × {name[:100]}" for ms, count, name in kernels[:_TOP]]


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
