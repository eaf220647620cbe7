"""Compiling before the first request instead of during it."""

from __future__ import annotations

from kernels.cpu import (
    activation,
    attention,
    chain,
    guesses,
    heads,
    laws,
    linear,
    linear_int4,
    linear_int8,
    ngrams,
    norm,
    plan,
    rotary,
    sampling,
)
from kernels.cpu.launch import Kernel
from kernels.cpu.tile import MULTIPLIES_BYTES


def make_ready() -> None:
    """Compiles every kernel: 20 seconds where that was never done before, else one."""
    everywhere = (activation, attention, chain, guesses, heads, laws, linear, ngrams, norm, plan, rotary, sampling)
    for module in (*everywhere, linear_int4, linear_int8) if MULTIPLIES_BYTES else everywhere:
        for value in vars(module).values():
            if isinstance(value, Kernel):
                value.compile()


if __name__ == "__main__":
    make_ready()
