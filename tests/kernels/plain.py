"""Kernels as they are where numba is not installed."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from unittest.mock import patch

from kernels import cpu
from kernels.cpu import ngram_table, ngrams


def plain_ngrams() -> ModuleType:
    """``kernels.cpu.ngrams`` of which nothing is compiled."""
    with (
        patch.dict(sys.modules),
        patch.multiple(cpu, AVAILABLE=False, ngrams=ngrams, ngram_table=ngram_table),
    ):
        for module in (ngrams, ngram_table):
            del sys.modules[module.__name__]
        return import_module(ngrams.__name__)
