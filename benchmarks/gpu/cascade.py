"""Measure from which length a shared prefix is read once on this GPU: ``python -m benchmarks.gpu.cascade --out FILE``.

One decoding step of one layer, for prefixes, numbers of branches and types of keys around the crossover: the time if
every branch reads all keys for itself, and if the prefix is read once. The costs of ``engine.attention.gpu_costs`` are
fitted to these times and become the GPU's entry there. Cells that FILE has already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.kernels import dry_run, measure
from benchmarks.kernels.attention import bytes_per_token, prefix_case
from engine.attention.gpu_costs import FILE, GpuCosts, dtype_name, read_costs
from kernels.quantize import QUANTIZED

_BRANCHES, _PREFIXES = (4, 16, 64), (64, 128, 256, 512, 1024, 4096)
_DRY_BRANCHES, _DRY_PREFIXES = (2, 3), (16, 48)


@dataclass(frozen=True)
class Timing:
    """One measured cell."""

    dtype: str
    token_bytes: int
    branches: int
    prefix: int
    apart_us: float
    """Time if every branch reads all keys for itself."""
    shared_us: float
    """Time if the prefix is read once."""

    @property
    def saved_us(self) -> float:
        """Microseconds that reading once saves; negative if it takes longer."""
        return self.apart_us - self.shared_us


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, print all cells and write the GPU's entry; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.cascade", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file of the measured cells")
    parser.add_argument("--costs", type=Path, default=FILE, help="file of the entries by name of GPU")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each cell, whose median counts")
    parser.add_argument("--dry-run", action="store_true", help="tiny cells on the CPU, and no entry")
    arguments = parser.parse_args(argv)
    grid = (_DRY_BRANCHES, _DRY_PREFIXES) if arguments.dry_run else (_BRANCHES, _PREFIXES)
    timings = read_timings(arguments.out)
    with torch.inference_mode(), dry_run.emulated_gpu() if arguments.dry_run else nullcontext():
        for timing in measure_cells(*grid, known=timings, rounds=arguments.rounds):
            timings.append(timing)
            arguments.out.write_text(json.dumps([asdict(cell) for cell in timings], indent=1), encoding="utf-8")
    if arguments.dry_run:  # nothing can be fitted to times of a few small operations
        print(markdown(timings, next(iter(read_costs().values()))))
        return 0
    about = torch.cuda.get_device_properties(0)
    costs = fit_costs(timings, multiprocessors=about.multi_processor_count, source=describe_versions())
    print(markdown(timings, costs))
    write_entry(arguments.costs, about.name, costs)
    return 0


def describe_versions() -> str:
    """Return the measurement's description for the entry."""
    import triton

    return f"benchmarks.gpu.cascade, torch {torch.__version__}, triton {triton.__version__}"


def read_timings(path: Path) -> list[Timing]:
    """Return the cells in a file; none if there is no such file."""
    return [Timing(**cell) for cell in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def measure_cells(
    branches: Iterable[int], prefixes: Sequence[int], *, known: Iterable[Timing], rounds: int
) -> Iterator[Timing]:
    """Measure the cells that are not ``known``."""
    done = {(cell.dtype, cell.branches, cell.prefix) for cell in known}
    for stored in (torch.bfloat16, *QUANTIZED):
        for rows in branches:
            for prefix in prefixes:
                if (dtype_name(stored), rows, prefix) in done:
                    continue
                case = prefix_case(rows, prefix, stored)
                device = torch.device(measure.DEVICE)
                row = measure.compare(case, device, copy=math.nan, peak=lambda _: math.nan, rounds=rounds)[0]
                assert row.peer_value is not None
                size = bytes_per_token(stored)
                yield Timing(dtype_name(stored), size, rows, prefix, row.peer_value, row.ours)


def fit_costs(timings: Sequence[Timing], *, multiprocessors: int, source: str) -> GpuCosts:
    """Return the costs under which the saved times are closest to the measured ones, by least squares.

    A saved time is ``(branches - 1) * prefix * token_bytes / rate - prefix_us - query_us * branches``. Errors of
    timings grow with the times, so each difference is divided by the length of its two times. A cost that would be
    negative is zero. Raises ``ValueError`` if reading keys takes no time according to the cells.
    """
    dtypes = sorted({cell.dtype for cell in timings})
    rows = [
        [
            *((cell.branches - 1) * cell.prefix * cell.token_bytes / 1e3 * (cell.dtype == name) for name in dtypes),
            -1.0,
            -float(cell.branches),
        ]
        for cell in timings
    ]
    weights = np.array([1 / math.hypot(cell.apart_us, cell.shared_us) for cell in timings])
    matrix, saved = np.array(rows) * weights[:, None], np.array([cell.saved_us for cell in timings]) * weights
    used = np.ones(matrix.shape[1], np.bool_)
    found = np.zeros(matrix.shape[1])
    for _ in range(3):
        found[:] = 0
        found[used] = np.linalg.lstsq(matrix[:, used], saved, rcond=None)[0]
        if (found[-2:] >= 0).all():
            break
        used[-2:] &= found[-2:] >= 0
    if not (found[:-2] > 0).all():
        raise ValueError("the measured times do not grow with the keys that are read")
    rates = {name: round(1 / float(inverse), 1) for name, inverse in zip(dtypes, found[:-2], strict=True)}
    prefix_us, query_us = (round(float(value), 4) for value in found[-2:])
    return GpuCosts(prefix_us, query_us, rates, multiprocessors, source)


def chooses_shared(costs: GpuCosts, cell: Timing) -> bool:
    """Return True if the cost model reads the prefix of a cell once."""
    dtype = getattr(torch, cell.dtype)
    model = costs.cost_model(cell.token_bytes, dtype)
    return model.should_share(cell.prefix, cell.branches, cell.branches)


def markdown(timings: Iterable[Timing], costs: GpuCosts) -> str:
    """Format the cells and the fitted costs."""
    lines = [
        "| keys | branches | prefix | apart | shared | faster | chosen |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for cell in timings:
        names = ("shared" if shared else "apart" for shared in (cell.saved_us > 0, chooses_shared(costs, cell)))
        times = f"{cell.apart_us:.1f} µs | {cell.shared_us:.1f} µs"
        lines.append(f"| {cell.dtype} | {cell.branches} | {cell.prefix} | {times} | {' | '.join(names)} |")
    rates = ", ".join(f"{rate:.0f} GB/s of {name}" for name, rate in costs.read_gb_s.items())
    lines += [
        "",
        f"A shared prefix takes {costs.prefix_us:.1f} µs and {costs.query_us:.3f} µs a query; rows read {rates}",
    ]
    return "\n".join(lines)


def write_entry(path: Path, name: str, costs: GpuCosts) -> None:
    """Write a GPU's entry and leave the others as they are."""
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    entries[name] = asdict(costs)
    path.write_text(json.dumps(dict(sorted(entries.items())), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
