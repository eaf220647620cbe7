"""Answers: found in a solution's text, brought to a form in which equal ones are equal, and voted on.

A solution without an answer abstains: it is in no class and has no vote.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from reasoner.equivalence import Equivalence
from reasoner.jobs import Vote
from reasoner.tree import Node

_PLAIN_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(/\d+)?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(\D|$))")


def extract_answer(text: str) -> str | None:
    """The content of the last complete ``\\boxed{…}``; ``None`` when there is none or it is empty."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        content = _balanced(text, start + len("\\boxed{"))
        if content is not None:
            return content.strip() or None
        start = text.rfind("\\boxed{", 0, start)
    return None


def canonical(answer: str) -> str:
    """A form in which equal plain numbers are equal strings (7, 7.0, 14/2, $7$, 1,000); anything else only loses
    its white space and its dollar signs."""
    bare = re.sub(r"\s+|\\[,;!]|\$", "", answer).rstrip(".")
    number = _THOUSANDS.sub("", bare)
    if _PLAIN_NUMBER.fullmatch(number) and not re.fullmatch(r".*/0+", number):
        top, _, bottom = number.partition("/")
        return str(Fraction(top) / Fraction(bottom or "1"))
    return bare


async def classes(
    candidates: Sequence[Node], how: Literal["math", "text"], equivalence: Equivalence
) -> list[list[Node]]:
    """Groups candidates by equivalent answer, in order of first appearance.

    ``text`` compares canonical forms. ``math`` asks math-verify about canonical forms that differ and are not both
    plain numbers.
    """
    groups: dict[str, list[Node]] = {}
    for node in candidates:
        if node.answer is None:
            continue
        form = canonical(node.answer)
        if form not in groups and how == "math":
            form = await equivalence.representative(form, list(groups))
        groups.setdefault(form, []).append(node)
    return list(groups.values())


def votes(groups: Sequence[Sequence[Node]], weights: dict[Node, float]) -> list[tuple[Vote, list[Node]]]:
    """One vote for each class, heaviest first; of equally heavy ones the class that appeared first."""
    counted = [
        (Vote(answer=group[0].answer or "", count=len(group), weight=sum(weights[node] for node in group)), list(group))
        for group in groups
    ]
    return sorted(counted, key=lambda pair: -pair[0].weight)


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None
