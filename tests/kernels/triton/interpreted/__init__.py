"""Tests whose process interprets; Triton asks when it sees a kernel, so this comes before everything else."""

import os

from tests.kernels.triton.device import DEVICE

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
