"""Tests of the domain share the processes that compare answers and match patterns."""

from __future__ import annotations

import pytest

from tests.children import no_children, warm_children

__all__ = ["no_children", "warm_children"]


@pytest.fixture(autouse=True)
def _shared(warm_children: None) -> None:
    """Keep them from the first test on."""
