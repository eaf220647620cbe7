"""The device of the tests in ``interpreted``: the interpreter, or a GPU with ``REASONER_TEST_DEVICE=cuda``."""

from __future__ import annotations

import os

DEVICE = os.environ.get("REASONER_TEST_DEVICE", "cpu")
