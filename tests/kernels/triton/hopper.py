"""Compile the kernels for a Hopper GPU, or a Blackwell one, on a machine that has none, and read the machine code.

Inside ``compiling`` a launch compiles its kernel exactly as a launch on a GPU would, with the same specialisation by
divisibility of sizes and strides, and does not run it. Tensors on torch's device ``meta`` do as arguments: they have
shapes and types and need no memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory of one program on a Hopper GPU. With more it compiles, but the launch fails."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


@dataclass(frozen=True, repr=False)
class Compiled:
    """The compiled kernel of one launch."""

    kernel: str
    registers: int
    """Registers of a thread, at most 255."""
    stack: int
    """Bytes of local memory of a thread: 0 unless registers were spilled."""
    spills: int
    """Number of instructions that spill and reload registers."""
    shared: int
    """Bytes of shared memory of a program."""
    warps: int
    instructions: Counter[str]
    """Instruction names in the machine code, with their suffixes: ``LDG.E.128.CONSTANT``."""

    @property
    def occupancy(self) -> float:
        """Share of a multiprocessor's 64 warps that can be resident.

        It has 65,536 registers, allocated to warps in units of 256, 228 KiB of shared memory, of which each program
        takes one KiB more, and room for 32 programs.
        """
        by_registers = 65536 // (-(-self.registers * 32 // 256) * 256) // self.warps
        by_shared = 228 * 1024 // (self.shared + 1024)
        return min(32, 64 // self.warps, by_registers, by_shared) * self.warps / 64

    def count(self, name: str, part: str = "") -> int:
        """Return the number of instructions with a name and a suffix."""
        return sum(
            times
            for instruction, times in self.instructions.items()
            if instruction.split(".")[0] == name and part in instruction
        )

    def __repr__(self) -> str:
        kinds = {
            "LDG.128": self.count("LDG", ".128"),
            **{name: self.count(name) for name in ("LDG", "LDGSTS", "HMMA", "HGMMA", "IMMA", "IGMMA", "QGMMA")},
        }
        return (
            f"{self.kernel}: {self.registers} registers, stack {self.stack}, {self.spills} spills, {self.shared} bytes "
            f"shared, occupancy {self.occupancy:.2f}, {self.instructions.total()} instructions, "
            + ", ".join(f"{times} {name}" for name, times in kinds.items() if times)
        )


class _NoGPU:
    """The driver that Triton queries before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def compiling(capability: int = 90) -> Iterator[list[Compiled]]:
    """Make launches compile for Hopper and do nothing else; the list gets the compiled kernels.

    ``capability``: the compute capability in tenths; 100 is Blackwell.
    """
    made: list[Compiled] = []
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        made.append(_inspect(kernel))
        return kernel

    driver.set_active(_NoGPU(capability))
    JITFunction.run = compile_only
    try:
        yield made
    finally:
        JITFunction.run, driver._active = run, active


def _inspect(kernel: Any) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(kernel.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", str(binary))
        code = _tool("nvdisasm", "--print-code", str(binary))
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if numbers is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {usage}")
    instructions = Counter(_INSTRUCTION.findall(code))
    return Compiled(
        kernel=kernel.metadata.name,
        registers=int(numbers[1]),
        stack=int(numbers[2]),
        spills=sum(times for name, times in instructions.items() if name.split(".")[0] in ("STL", "LDL")),
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        instructions=instructions,
    )


def _tool(name: str, *args: str) -> str:
    return subprocess.run([_TOOLS / name, *args], capture_output=True, text=True, check=True, timeout=60).stdout
