"""Where the tests in ``interpreted`` run their kernels: in the interpreter, or on a GPU with
``REASONER_TEST_DEVICE=cuda pytest tests/kernels/triton/interpreted``."""

from __future__ import annotations

import os

DEVICE = os.environ.get("REASONER_TEST_DEVICE", "cpu")
