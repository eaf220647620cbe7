"""Kernels as they are where numba is not installed."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from unittest.mock import patch

from kernels.cpu import availability, ngrams
from kernels.cpu.ngrams import match, table


def plain_ngrams() -> ModuleType:
    """``kernels.cpu.ngrams.match`` of which nothing is compiled."""
    with (
        patch.dict(sys.modules),
        patch.object(availability, "AVAILABLE", False),
        patch.multiple(ngrams, match=match, table=table),
    ):
        for module in (match, table):
            del sys.modules[module.__name__]
        return import_module(match.__name__)
