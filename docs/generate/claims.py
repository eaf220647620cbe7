"""Tables of claims of papers beside what the committed results of evaluations say of them.

A block ``<!-- claims: A; B -->`` in a page has claims in one of these forms, where a side is ``STRATEGY@N`` with the
parameters of its row in ``results.json``, and ``FOLDER`` one of ``benchmarks/results``; a side of another folder
begins with it::

    FOLDER STRATEGY@N > STRATEGY@N                 more accurate
    FOLDER STRATEGY@N > STRATEGY at equal tokens
    FOLDER STRATEGY@N ~ STRATEGY@N                 as accurate, within two points
    FOLDER STRATEGY@N < STRATEGY@N in tokens       fewer tokens, the verifier's included

A difference has the interval of the same problems where the results compare the two; else that of two independent
proportions, which is wider if the problems are the same.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.generate.tables import table

EQUAL_POINTS = 0.02
"""Largest difference of accuracies that count as equal."""
HOLDS, FAILS, UNCLEAR = "holds", "does not hold", "not clear"
_CLAIM = re.compile(
    r"(?P<folder>\S+) (?P<first>\S+)@(?P<n>\d+) (?P<sign>[<>~]) (?:(?P<other>\S+) )??(?P<second>[^\s@]+)"
    r"(?:@(?P<m>\d+))?(?: (?P<how>at equal tokens|in tokens))?"
)
_FULL_NAMES = {
    "real": "seven tasks of reasoning-gym",
    "real-families": "the same tasks, each with a table of its own",
}

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of two accuracies with its 95 % interval; paired if both were compared on the same problems."""

    value: float
    low: float
    high: float
    is_paired: bool

    def describe(self) -> str:
        interval = f"{_write_points(self.low)} – {_write_points(self.high)}"
        return f"{_write_points(self.value)} ({interval}{'' if self.is_paired else ', unpaired'})"


def create_table(claims: str, results: Path) -> str:
    """Return the table of a block's claims; ``results`` is the folder of all results.

    Raises ``ValueError`` for a claim that cannot be read, and ``LookupError`` for a result that is not there.
    """
    rows = [_create_row(claim.strip(), results) for claim in claims.split(";")]
    return table(("results", "claim", "difference", "here"), rows)


def create_summary(pages: Iterable[Path], results: Path) -> str:
    """Return a table of pages with the numbers of their claims by what the results say."""
    rows = []
    for page in pages:
        judged = [_create_row(claim.strip(), results)[-1] for claim in _list_claims(page.read_text())]
        counts = [str(judged.count(verdict) or "") for verdict in (HOLDS, UNCLEAR, FAILS)]
        rows.append((f"[{page.stem}]({page.name})", *counts))
    return table(("strategy", HOLDS, UNCLEAR, FAILS), rows)


def _list_claims(page: str) -> list[str]:
    return [
        claim for block in re.findall(r"^<!-- claims: (.+?) -->$", page, re.MULTILINE) for claim in block.split(";")
    ]


def _create_row(text: str, results: Path) -> tuple[str, str, str, str]:
    claim = _CLAIM.fullmatch(text)
    if claim is None:
        raise ValueError(f"not a claim: {text!r}")
    document, folder = _read(results, claim["folder"]), claim["folder"]
    first = _find_row(document, claim["first"], int(claim["n"]))
    where = f"`{folder}`" if folder not in _FULL_NAMES else f"`{folder}` ({_FULL_NAMES[folder]})"
    if claim["how"] == "at equal tokens":
        difference, note = _find_comparison(document, first, claim["second"])
        words = f"{_describe(first)} > `{claim['second']}` {note}"
        return where, words, difference.describe(), _judge(difference)
    other = claim["other"]
    second = _find_row(_read(results, other) if other else document, claim["second"], int(claim["m"] or 1))
    words = f"{_describe(first)} {claim['sign']} {_describe(second)}"
    if other:
        where += f", `{other}`"
    if claim["how"] == "in tokens":
        ratio = _count_tokens(first) / _count_tokens(second)
        return where, f"{words} in tokens", f"{ratio:.2f} ×", HOLDS if ratio < 1 else FAILS
    difference = _compare(document, first, second) if not other else _compare_apart(first, second)
    if claim["sign"] == "~":
        return where, words, difference.describe(), HOLDS if abs(difference.value) <= EQUAL_POINTS else FAILS
    return where, words, difference.describe(), _judge(difference)


def _read(results: Path, folder: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((results / folder / "results.json").read_text())
    if "all tasks" not in document:
        return document
    differences = [entry for entry in document["differences"] if entry["task"] == "all tasks"]
    return {"rows": document["all tasks"], "comparisons": [_read_difference(entry) for entry in differences]}


def _read_difference(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a difference of several tasks, such as of ``beam at 16`` over ``greedy``, as one of a single suite."""
    strategy, _, n = entry["strategy"].partition(" at ")
    over, _, m = entry["over"].partition(" at ")
    what = "" if not m else "equal n" if n == m else f"n = {m}"
    return {**entry, "strategy": strategy, "n": int(n), "over": over, "what": what}


def _find_row(document: Mapping[str, Any], strategy: str, n: int) -> Row:
    """Return the row of the results' own model; those of larger models that only decode greedily come after it."""
    found: list[Row] = [row for row in document["rows"] if (row["strategy"], row["n"]) == (strategy, n)]
    if not found:
        raise LookupError(f"the results have no {strategy}@{n}")
    return found[0]


def _compare(document: Mapping[str, Any], first: Row, second: Row) -> Difference:
    """Return the difference on the same problems, in either direction, or that of the two intervals."""
    for one, other, sign in ((first, second, 1), (second, first, -1)):
        for entry in document["comparisons"]:
            is_pair = (entry["strategy"], entry["n"], entry["over"]) == (one["strategy"], one["n"], other["strategy"])
            if is_pair and (entry["what"] == "" or (entry["what"] == "equal n" and one["n"] == other["n"])):
                low, high = sorted((sign * entry["low"], sign * entry["high"]))
                return Difference(sign * entry["difference"], low, high, is_paired=True)
    return _compare_apart(first, second)


def _compare_apart(first: Row, second: Row) -> Difference:
    """Return the difference with the interval of two independent proportions, from the intervals of both.

    Source: Newcombe 1998, "Interval estimation for the difference between independent proportions", method 10.
    """
    value = first["accuracy"] - second["accuracy"]
    below = math.hypot(first["accuracy"] - first["low"], second["high"] - second["accuracy"])
    above = math.hypot(first["high"] - first["accuracy"], second["accuracy"] - second["low"])
    return Difference(value, value - below, value + above, is_paired=False)


def _find_comparison(document: Mapping[str, Any], first: Row, other: str) -> tuple[Difference, str]:
    for entry in document["comparisons"]:
        is_pair = (entry["strategy"], entry["n"], entry["over"]) == (first["strategy"], first["n"], other)
        if is_pair and entry["what"] in ("equal tokens", "nearest tokens"):
            words = "at equal tokens" if entry["what"] == "equal tokens" else f"({entry['note']})"
            return Difference(entry["difference"], entry["low"], entry["high"], is_paired=True), words
    raise LookupError(f"the results do not compare {first['strategy']}@{first['n']} with {other} at equal tokens")


def _judge(difference: Difference) -> str:
    return HOLDS if difference.low > 0 else FAILS if difference.high < 0 else UNCLEAR


def _describe(row: Row) -> str:
    count = "" if row["n"] == 1 else f" of {row['n']}"
    return f"`{row['strategy']}`{count}: {100 * row['accuracy']:.1f} %, {_count_tokens(row):.0f} tokens"


def _count_tokens(row: Row) -> float:
    return float(row["tokens"] + row["verifier_tokens"])


def _write_points(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "\N{MINUS SIGN}")
