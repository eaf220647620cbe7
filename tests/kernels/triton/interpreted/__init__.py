"""Tests in a process that interprets kernels. Triton decides that when it is imported, so this must come first."""

import os

from tests.kernels.triton.device import DEVICE

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
