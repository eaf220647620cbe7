"""Kernels that numba compiles for the processor at hand. Each has a reference in torch or numpy operators, which also
does its work where numba is not installed."""

from __future__ import annotations

from importlib.util import find_spec

AVAILABLE = find_spec("numba") is not None
"""Whether the modules of this package can be imported."""
