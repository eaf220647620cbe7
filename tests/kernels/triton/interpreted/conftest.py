"""Patches and guards the interpreter of these tests."""

from __future__ import annotations

import numpy as np

from tests.kernels.triton import guard, interpreter
from tests.kernels.triton.device import DEVICE

if DEVICE == "cpu":
    interpreter.correct()
    guard.install()
    np.seterr(all="ignore")  # a GPU gives no warning of an overflow
else:
    collect_ignore = ["test_interpreter.py"]
