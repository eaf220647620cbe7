"""The interpreter of these tests is corrected and guarded."""

from __future__ import annotations

from tests.kernels.triton import guard, interpreter

interpreter.correct()
guard.install()
