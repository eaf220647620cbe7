"""Choose which of many similar cases the quick suite runs; the others are marked ``long`` (``make test-long``)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def mostly_long(cases: Iterable[Any], every: int) -> list[Any]:
    """Return the cases, or parameters of pytest, as such parameters: the first and then one in ``every`` is quick."""
    return [_parameter(case, is_quick=index % every == 0) for index, case in enumerate(cases)]


def mostly_long_grid(*factors: Iterable[Any], every: int) -> list[Any]:
    """Return every combination of the factors' values.

    If ``every`` has no common divisor with any factor's length, the quick cases cover each pair of values of two
    neighbouring factors.
    """
    return mostly_long(product(*factors), every)


def _parameter(case: Any, *, is_quick: bool) -> Any:
    marks = () if is_quick else (pytest.mark.long,)
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=(*case.marks, *marks), id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
