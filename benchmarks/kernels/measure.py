"""Timing of kernels, and the rates that they are compared with.

The inputs of a kernel must come from memory, as they do between the layers of a model. So there are several sets of
inputs, more than twice the second-level cache, and calls take turns among them. Calls are captured in a CUDA graph, so
that only the GPU is timed. Competitors take turns too, in an order that is reversed from round to round, and the median
of the rounds counts. Before anything is timed, its result is compared with the expected one.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from benchmarks.engine.measure import Row

Run = Callable[[], Tensor]
P = ParamSpec("P")
R = TypeVar("R")

DEVICE = "cuda"
_CALLS = 40
"""Approximate number of calls in a graph."""
_SETS = 256
"""Maximum number of sets of inputs."""
_SQUARE = 8192


class Runs(NamedTuple):
    """A case with one set of inputs."""

    ours: Run
    peers: dict[str, Run]
    """Other ways to the same result, by name."""
    expected: Run
    """Computes the expected result; may be slow."""
    tolerance: float
    """Largest difference from the expected result, relative to its largest number."""
    alike: bool = True
    """True if the peers compute the expected result too."""


@dataclass(frozen=True)
class Case:
    """A kernel with some inputs, to be timed."""

    name: str
    moved: int
    """Bytes that must be read and written at least."""
    build: Callable[[torch.device], Runs]
    """Makes new inputs at each call."""
    work: float = 0
    """Operations of its products if the matrix units may limit it; a multiply-add is two."""
    numbers: torch.dtype = torch.bfloat16
    """Type of the numbers in its products."""


class WrongResultError(Exception):
    """A kernel computes a wrong result."""


def documents(cases: Iterable[Case], *, rounds: int, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Time all cases on the current GPU; yield the document of results so far after each case.

    So an interrupted run leaves something. A case that fails, or whose result is wrong, is reported and not timed.
    """
    device = torch.device(DEVICE)
    about = torch.cuda.get_device_properties(device)
    copy, peak = copy_rate(device), cache(partial(matrix_rate, device))
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for case in cases:
        progress(case.name)
        try:
            rows += compare(case, device, copy, peak, rounds)
        except Exception as error:  # a peer's compiler may raise anything
            failed[case.name] = f"{type(error).__name__}: {error}"
            progress(failed[case.name])
        torch.cuda.empty_cache()
        machine = {
            "gpu": about.name,
            "multiprocessors": about.multi_processor_count,
            "second_level_cache_bytes": about.L2_cache_size,
            "clocks": _clocks(),
            "copy_gb_s": copy / 1e9,
            "torch": torch.__version__,
            "rounds": rounds,
        }
        yield {"machine": machine, "rows": [asdict(row) for row in rows], "failed": failed}


def markdown(document: dict[str, Any]) -> str:
    """Format the document as a table."""
    about = document["machine"]
    lines = [
        f"{about['gpu']} ({about['clocks']}), copies {about['copy_gb_s']:.0f} GB/s (read and written); "
        f"torch {about['torch']}, median of {about['rounds']} rounds.",
        "",
        "| case | metric | ours | peer | its value | ratio |",
        "|---|---|---:|---|---:|---:|",
    ]
    for row in (Row(**row) for row in document["rows"]):
        values = f"{row.ours:.3g} {row.unit} | {row.peer} | {row.peer_value:.3g} {row.unit} | {row.ratio:.2f}"
        lines.append(f"| {row.case} | {row.metric} | {values} |")
    lines += [f"\n{case}: {error.splitlines()[0]}" for case, error in document["failed"].items()]
    return "\n".join(lines) + "\n"


def compare(
    case: Case, device: torch.device, copy: float, peak: Callable[[torch.dtype], float], rounds: int
) -> list[Row]:
    """Return the rows of a case: its time and those of its peers, its bandwidth and that of a copy, its operations per
    second and those of a large product of such numbers."""
    torch.compiler.reset()  # torch stops compiling a function that has had many shapes
    room = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    sets = [case.build(device) for _ in range(max(2, min(_SETS, -(-room // case.moved) + 1)))]
    check(case.name, sets[0])
    names = ["ours", *sets[0].peers]
    graphs = {name: _captured([one.ours if name == "ours" else one.peers[name] for one in sets]) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 else reversed(names):
            times[name].append(_seconds(*graphs[name]))
    median = {name: statistics.median(values) for name, values in times.items()}
    ours = median.pop("ours")
    rows = [Row(case.name, "time", "µs", ours * 1e6, name, value * 1e6, value / ours) for name, value in median.items()]
    rate = case.moved / ours
    rows.append(Row(case.name, "bandwidth", "GB/s", rate / 1e9, "copy", copy / 1e9, rate / copy))
    if case.work:
        rate, most = case.work / ours, peak(case.numbers)
        rows.append(Row(case.name, "products", "TFLOP/s", rate / 1e12, "peak", most / 1e12, rate / most))
    return rows


def check(name: str, runs: Runs) -> None:
    """Raise ``WrongResultError`` unless the kernel and all peers compute the expected result."""
    expected = runs.expected().double()
    for who, run in {"ours": runs.ours, **(runs.peers if runs.alike else {})}.items():
        error = float((run().double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
        if not error <= runs.tolerance:
            raise WrongResultError(f"{name}: the result of {who} is off by {error:.2g} of the largest number")


def copy_rate(device: torch.device) -> float:
    """Return the bytes that a kernel which changes every number reads and writes per second.

    Torch's own copy is left to the copy engines, which are slower than the memory: by a third on an H200.
    """
    source = torch.zeros(1 << 28, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    graph, calls = _captured([lambda: torch.bitwise_not(source, out=target)])
    return 2 * source.nbytes / min(_seconds(graph, calls) for _ in range(5))


def matrix_rate(device: torch.device, numbers: torch.dtype) -> float:
    """Return the operations per second of torch's product of large square matrices."""
    random = [torch.randn(_SQUARE, _SQUARE, device=device) for _ in range(2)]
    if numbers == torch.int8:
        a, b = ((x * 30).clamp(-127, 127).to(numbers) for x in random)
        run = partial(torch._int_mm, a, b.T)
    elif numbers == torch.float8_e4m3fn:
        a, b = (x.to(numbers) for x in random)
        one = torch.ones((), device=device)
        run = partial(torch._scaled_mm, a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        a, b = (x.to(numbers) for x in random)
        run = partial(torch.mm, a, b.T)
    graph, calls = _captured([run])
    return 2 * _SQUARE**3 / min(_seconds(graph, calls) for _ in range(5))


def compiled(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """Compile ``function`` with torch's compiler on a GPU; return it unchanged elsewhere.

    All tensors should be arguments, so that it is compiled once for all sets of inputs.
    """
    fast: Callable[P, R] = torch.compile(function, dynamic=False) if device.type == "cuda" else function
    return fast


def _clocks() -> str:
    """Return the clocks of processors and memory, right after the load."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "clocks unknown"
    return answer.splitlines()[0]


def _captured(runs: list[Run]) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return a graph of the runs in turn, and its number of calls."""
    for run in runs[:3]:  # compiles, and lets libraries choose
        run()
    torch.cuda.synchronize()
    graph, turns = torch.cuda.CUDAGraph(), max(1, _CALLS // len(runs))
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for run in runs:
                run()
    return graph, turns * len(runs)


def _seconds(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Return the time of one call."""
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls
