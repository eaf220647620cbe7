"""Every kernel compiled for a Blackwell GPU: nothing is spilled, and a program fits a multiprocessor.

The limits of registers are those for Hopper, in the other modules; the machine code differs little.
"""

from __future__ import annotations

import pytest

from benchmarks.kernels.resources import compile_launch, list_launches
from tests.kernels.triton.hopper import SHARED_MEMORY
from tests.long import mostly_long

LAUNCHES = dict(list_launches())


@pytest.mark.parametrize("name", mostly_long(LAUNCHES, every=16))
def test_kernels_fit_a_blackwell_gpu(name: str) -> None:
    for kernel in compile_launch(LAUNCHES[name], 100):
        assert kernel.spills == kernel.stack == 0, kernel
        assert kernel.shared <= SHARED_MEMORY, kernel
        assert kernel.occupancy >= 0.0625, kernel


def test_every_specialisation_has_a_name_of_its_own() -> None:
    assert len(LAUNCHES) == len([*list_launches()])
