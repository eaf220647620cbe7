"""Compiling before the first request instead of during it."""

from __future__ import annotations

from kernels.cpu.attention import paged, plan, rotary_write
from kernels.cpu.availability import HAS_INT8_DOT
from kernels.cpu.layers import activation, norm
from kernels.cpu.linear import fp32, int4, int8
from kernels.cpu.ngrams import match
from kernels.cpu.runtime import kernel
from kernels.cpu.runtime.kernel import Kernel
from kernels.cpu.sampling import draft_chain, draft_heads, params, sampler, topk_drafts


def make_ready() -> None:
    """Compiles every kernel: 20 seconds where that was never done before, else one."""
    everywhere = (
        activation,
        paged,
        draft_chain,
        topk_drafts,
        draft_heads,
        params,
        fp32,
        match,
        norm,
        plan,
        rotary_write,
        sampler,
        kernel,
    )
    for module in (*everywhere, int4, int8) if HAS_INT8_DOT else everywhere:
        for value in vars(module).values():
            if isinstance(value, Kernel):
                value.compile()


if __name__ == "__main__":
    make_ready()
