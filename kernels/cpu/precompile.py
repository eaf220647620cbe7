"""Compile all kernels before the first request: ``python -m kernels.cpu.precompile``."""

from __future__ import annotations

import os
import subprocess
import sys

from kernels.cpu.attention import paged, plan, rotary_write, sinks
from kernels.cpu.availability import HAS_BYTE_PRODUCTS
from kernels.cpu.layers import activation, elementwise, experts, gate, norm
from kernels.cpu.linear import fp32, half, int4, int8, low_rank
from kernels.cpu.ngrams import match
from kernels.cpu.recurrent import convolution, gated_delta, mamba2
from kernels.cpu.runtime import kernel
from kernels.cpu.runtime.kernel import Kernel
from kernels.cpu.sampling import draft_chain, draft_heads, params, sampler, topk_drafts


def compile_kernels(part: int = 0, parts: int = 1) -> None:
    """Compile every kernel, or one of several equal parts of them: a minute if that was never done before, else one
    second.
    """
    modules = [activation, gate, norm, paged, plan, rotary_write, sinks, fp32, match, kernel]
    modules += [elementwise, experts, convolution, gated_delta, mamba2, low_rank]
    modules += [sampler, params, topk_drafts, draft_chain, draft_heads]
    modules += [int4, int8] if HAS_BYTE_PRODUCTS else []
    kernels = [value for module in modules for value in vars(module).values() if isinstance(value, Kernel)]
    kernels += half.ALL_KERNELS
    for each in kernels[part::parts]:
        each.compile()


def main() -> int:
    """Compile every kernel, in as many processes as there are processors; return 0 if all succeeded."""
    parts = min(os.cpu_count() or 1, 4)
    command = [sys.executable, "-m", "kernels.cpu.precompile"]
    others = [subprocess.Popen([*command, str(part), str(parts)]) for part in range(1, parts)]
    compile_kernels(0, parts)
    return max((abs(other.wait()) for other in others), default=0)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    compile_kernels(*map(int, sys.argv[1:]))
