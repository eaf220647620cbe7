"""Compile every Triton kernel for a Hopper and a Blackwell GPU, on any machine, and write a table of their resources.

``python -m benchmarks.kernels resources``. The kernels and shapes are those whose limits the compile tests check
(``tests/kernels/triton/compiled``); nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import triton

from tests.kernels.triton.compiled import test_layers, test_paged_attention, test_products, test_recurrent
from tests.kernels.triton.hopper import Compiled, compiling

TARGETS = 90, 100
"""Compute capabilities in tenths: Hopper and Blackwell, whose multiprocessors have equal numbers of registers, shared
memory and warps."""
TABLE = Path("benchmarks/results/kernel-resources/table.md")


def list_launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of every specialisation and a function that launches it on tensors without memory."""
    for name, launch, *_ in test_layers.CASES:
        yield name, launch
    for name, launch, *_ in test_recurrent.CASES:
        yield name, launch
    for name, launch, *_ in test_products.CASES:
        yield name, launch
    yield "int4, one row", lambda: test_products.int4(1)
    for name, kind in test_paged_attention.KINDS.items():
        if kind.capability == 90:
            yield name, partial(test_paged_attention.launch_kind, kind)


def compile_launch(launch: Callable[[], object], capability: int) -> list[Compiled]:
    """Return the kernels of a launch."""
    with compiling(capability) as made:
        launch()
    return made


def markdown(progress: Callable[[str], None]) -> str:
    """Return the table of all specialisations."""
    lines = [
        "# Resources of the Triton kernels",
        "",
        f"Compiled by Triton {triton.__version__}; nothing was run.",
        "",
        "| specialisation | kernel | target | registers | spills | stack | shared, KiB | warps | occupancy |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, launch in list_launches():
        progress(name)
        for target in TARGETS:
            for kernel in {repr(kernel): kernel for kernel in compile_launch(launch, target)}.values():
                numbers = f"{kernel.registers} | {kernel.spills} | {kernel.stack} | {kernel.shared / 1024:.1f}"
                end = f"{kernel.warps} | {kernel.occupancy:.2f}"
                lines.append(f"| {name} | `{kernel.kernel}` | sm_{target} | {numbers} | {end} |")
    return "\n".join(lines) + "\n"
