"""Compile all kernels before the first request: ``python -m kernels.cpu.precompile``."""

from __future__ import annotations

from kernels.cpu.attention import paged, plan, rotary_write
from kernels.cpu.availability import HAS_INT8_DOT
from kernels.cpu.layers import activation, norm
from kernels.cpu.linear import fp32, int4, int8
from kernels.cpu.ngrams import match
from kernels.cpu.runtime import kernel
from kernels.cpu.runtime.kernel import Kernel
from kernels.cpu.sampling import draft_chain, draft_heads, params, sampler, topk_drafts


def compile_kernels() -> None:
    """Compile every kernel: 20 seconds if that was never done before, else one."""
    modules = [activation, norm, paged, plan, rotary_write, fp32, match, kernel]
    modules += [sampler, params, topk_drafts, draft_chain, draft_heads, *([int4, int8] if HAS_INT8_DOT else [])]
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Kernel):
                value.compile()


if __name__ == "__main__":
    compile_kernels()
