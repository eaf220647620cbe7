"""Tests in a process that interprets kernels. Triton decides that on its import, so this must be imported first."""

import os

from tests.kernels.triton.device import DEVICE

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
