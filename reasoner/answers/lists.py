r"""Brackets and lists: what is around an answer, where the items of a list end, and when two lists are equal.

All readers of answers follow it: ``plain`` for lists of numbers, ``algebra`` for lists of formulas and ``inequalities``
for intervals and finite sets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

_CLOSING = {"\\{": ("\\}",), "{": ("}",), "(": (")", "]"), "[": (")", "]")}
_CONJUNCTION = re.compile(r"\s*[,;]?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*", re.IGNORECASE)


def strip_brackets(text: str) -> tuple[str, str]:
    r"""Return the kind of the brackets around the whole text, and their content.

    The kind is both brackets, such as ``[)``, or ``{}`` for a set ``\{1,2\}``; it is empty without brackets, and for
    the braces of a group in LaTeX, which are no part of the answer.
    """
    for opening, closings in _CLOSING.items():
        for closing in closings:
            if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + 1:
                inner = text[len(opening) : -len(closing)].strip()
                if split_items(inner) is not None:
                    return {"\\{": "{}", "{": ""}.get(opening, opening + closing), inner
    return "", text


def split_items(text: str) -> tuple[str, ...] | None:
    """Split at the commas, semicolons, "and" and "or" outside of brackets; ``None`` for unbalanced brackets."""
    text = _CONJUNCTION.sub(",", text)
    depth, items, begin = 0, [], 0
    for index, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif char in ",;" and not depth:
            items.append(text[begin:index].strip())
            begin = index + 1
    return None if depth else (*items, text[begin:].strip())


def are_equal_lists(
    kinds: tuple[str, str],
    ours: Sequence[T],
    theirs: Sequence[T],
    are_equal: Callable[[T, T], bool],
    *,
    is_ordered: bool = False,
) -> bool:
    """Return True if two lists within brackets of these ``kinds`` are equal; symmetric if ``are_equal`` is.

    Lists within braces or without brackets are sets, unless ``is_ordered``. A list without brackets equals one within
    parentheses, and from three items on one within square brackets: two items within these are an interval.
    """
    if len(ours) != len(theirs):
        return False
    if set(kinds) <= {"", "{}"}:
        if not is_ordered:
            return _can_pair_up(ours, theirs, are_equal) and _can_pair_up(theirs, ours, are_equal)
    elif kinds[0] != kinds[1] and not (set(kinds) == {"", "()"} or (set(kinds) == {"", "[]"} and len(ours) > 2)):
        return False
    return all(map(are_equal, ours, theirs))


def _can_pair_up(ours: Sequence[T], theirs: Sequence[T], are_equal: Callable[[T, T], bool]) -> bool:
    """Return True if each of ``ours`` can be matched greedily to an equal element of ``theirs`` of its own."""
    left = list(theirs)
    for item in ours:
        partner = next((index for index, other in enumerate(left) if are_equal(item, other)), None)
        if partner is None:
            return False
        del left[partner]
    return True
