"""The table: accuracy of each rule at n, the gap that it closes at equal tokens, and what verifying took.

Of n samples a vote reaches one accuracy, and a choice that is always right would reach pass@n. A rule closes the
fraction ``(accuracy - vote) / (pass@n - vote)`` of this gap, where the vote gets as many samples more as the verifier's
tokens would buy (up to all that there are). Intervals: 2,000 resamples of the problems.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.selection.collect import read_items
from benchmarks.selection.rules import best_at, pass_at, vote_at

NS = (8, 16, 64)
VOTE = "vote"
_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_NUM_RESAMPLES = 2000
Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A rule at n: means over problems; the gap with its interval, ``None`` where there is next to no gap."""

    suite: str
    rule: str
    n: int
    accuracy: float
    vote: float
    reached: float
    gap: float | None
    low: float | None
    high: float | None
    more_tokens: float
    """Tokens that the verifier computes for each generated one."""
    cached: float | None
    """Share of the verifier's input that was cached."""
    seconds: float
    """Seconds of the verifier for each second of sampling."""
    scored: float | None
    """Share of the samples with an answer that got a score."""


def write_report(folder: Path) -> str:
    """Write ``table.md`` and ``results.json``; return the table."""
    rows = [row for file in sorted(folder.glob("*.jsonl")) for row in measure(read_items(file))]
    text = _format_table(rows)
    (folder / "table.md").write_text(text)
    fields = [{name: getattr(row, name) for name in Row.__slots__} for row in rows]
    (folder / "results.json").write_text(json.dumps({"rows": fields}, indent=1) + "\n")
    return text


def measure(items: Sequence[Item]) -> list[Row]:
    """Return the rows of one suite."""
    if not items:
        return []
    grid = {n: [_vote(item, n) for item in items] for n in _GRID if n <= len(items[0]["right"])}
    rows = []
    for n in [n for n in NS if n in grid]:
        reached = [pass_at(item["right"], n) for item in items]
        vote = [_interpolate(grid, n, index) for index in range(len(items))]
        rows.append(_make_row(items, VOTE, n, accuracy=vote, vote=vote, reached=reached, cost=None))
        for name in items[0]["scores"]:
            more = _cost_ratio(items, name)
            equal = [_interpolate(grid, n * (1 + more), index) for index in range(len(items))]
            best = [best_at(item["right"], _fill_scores(item, name), n) for item in items]
            rows.append(_make_row(items, name, n, accuracy=best, vote=equal, reached=reached, cost=name))
            weights = [item["scores"][name] for item in items]
            is_plain = not any(score is not None for scores in weights for score in scores)  # votes are all equal then
            weighed = grid[n] if is_plain else [_vote(item, n, own) for item, own in zip(items, weights, strict=True)]
            rows.append(
                _make_row(items, f"{name}, weighted vote", n, accuracy=weighed, vote=equal, reached=reached, cost=name)
            )
    return rows + _measure_tournament(items, grid)


def _fill_scores(item: Item, name: str) -> list[float | None]:
    """Return the scores, of which those that the verifier did not give rank last, as in a job."""
    scores = zip(item["scores"][name], item["classes"], strict=True)
    return [-1.0 if score is None and number is not None else score for score, number in scores]


def _measure_tournament(items: Sequence[Item], grid: Mapping[int, Sequence[float]]) -> list[Row]:
    held = [index for index, item in enumerate(items) if item["tournament"] is not None]
    if not held:
        return []
    n = max(items[index]["tournament"][0] for index in held)
    computed = sum(items[index]["tournament"][2]["computed"] for index in held)
    cached = sum(items[index]["tournament"][2]["cached"] for index in held)
    spent = sum(sum(item["tokens"]) / len(item["tokens"]) * n for item in items)
    seconds = sum(items[index]["tournament"][2]["seconds"] for index in held)
    sampling = sum(item["seconds"] * n / len(item["tokens"]) for item in items)
    accuracy = [float(item["tournament"][1]) if item["tournament"] else _first_right(item) for item in items]
    vote = [_interpolate(grid, n * (1 + computed / spent), index) for index in range(len(items))]
    reached = [float(any(right for right in _first(item, n))) for item in items]
    row = _make_row(items, "tournament by grades", n, accuracy=accuracy, vote=vote, reached=reached, cost=None)
    measured = {"more_tokens": computed / spent, "cached": cached / (cached + computed), "seconds": seconds / sampling}
    return [Row(**{name: getattr(row, name) for name in Row.__slots__} | measured)]


def _first(item: Item, n: int) -> list[bool]:
    """Return whether each of the first n samples with an answer is right."""
    return [right for right, number in zip(item["right"], item["classes"], strict=True) if number is not None][:n]


def _first_right(item: Item) -> float:
    first = _first(item, 1)
    return float(bool(first) and first[0])


def _vote(item: Item, n: int, weights: Sequence[float | None] | None = None) -> float:
    rng = random.Random(f"{item['seed']}/{item['problem']}/{n}")
    return vote_at(item["right"], item["classes"], n, rng, weights)


def _interpolate(grid: Mapping[int, Sequence[float]], n: float, index: int) -> float:
    """Return an item's accuracy of a vote of n samples, between those of the grid; beyond it that of all."""
    sizes = sorted(grid)
    if n >= sizes[-1]:
        return float(grid[sizes[-1]][index])
    high = next(size for size in sizes if size > n)
    low = sizes[sizes.index(high) - 1]
    part = (n - low) / (high - low)
    return float((1 - part) * grid[low][index] + part * grid[high][index])


def _find_scored_share(items: Sequence[Item], name: str) -> float:
    answered = sum(number is not None for item in items for number in item["classes"])
    return sum(score is not None for item in items for score in item["scores"][name]) / max(1, answered)


def _cost_ratio(items: Sequence[Item], name: str) -> float:
    computed = sum(item["costs"][name]["computed"] for item in items)
    return float(computed / sum(sum(item["tokens"]) for item in items))


def _make_row(
    items: Sequence[Item],
    rule: str,
    n: int,
    *,
    accuracy: Sequence[float],
    vote: Sequence[float],
    reached: Sequence[float],
    cost: str | None,
) -> Row:
    gap, low, high = _find_gap(items, accuracy, vote, reached)
    more = 0.0 if cost is None else _cost_ratio(items, cost)
    cached = seconds = None
    if cost is not None:
        costs = [item["costs"][cost] for item in items]
        read = sum(each["computed"] + each["cached"] for each in costs)
        cached = sum(each["cached"] for each in costs) / read if read else None
        seconds = sum(each["seconds"] for each in costs) / sum(item["seconds"] for item in items)
    return Row(
        items[0]["suite"],
        rule,
        n,
        accuracy=_mean(accuracy),
        vote=_mean(vote),
        reached=_mean(reached),
        gap=gap,
        low=low,
        high=high,
        more_tokens=more,
        cached=cached,
        seconds=seconds or 0.0,
        scored=None if cost is None else _find_scored_share(items, cost),
    )


def _find_gap(
    items: Sequence[Item], accuracy: Sequence[float], vote: Sequence[float], reached: Sequence[float]
) -> tuple[float | None, float | None, float | None]:
    """Return the fraction of the gap that is closed, with its 95 % interval over problems."""
    by_problem: dict[str, list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        by_problem[item["problem"]].append(index)
    sums = [
        (sum(accuracy[index] - vote[index] for index in group), sum(reached[index] - vote[index] for index in group))
        for group in by_problem.values()
    ]
    gap = _ratio(sums)
    if gap is None:
        return None, None, None
    rng = random.Random(0)
    found = [_ratio(rng.choices(sums, k=len(sums))) for _ in range(_NUM_RESAMPLES)]
    known = sorted(value for value in found if value is not None)
    if len(known) < _NUM_RESAMPLES * 0.95:
        return gap, None, None
    return gap, known[int(0.025 * len(known))], known[int(0.975 * len(known))]


def _ratio(sums: Sequence[tuple[float, float]]) -> float | None:
    above, whole = (sum(values) for values in zip(*sums, strict=True))
    return above / whole if whole > 0.005 * len(sums) else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _format_table(rows: Sequence[Row]) -> str:
    """Return a line for each rule of a suite, with its accuracy at each n and the part of the gap that it closes."""
    lines: dict[tuple[str, str], dict[int, Row]] = defaultdict(dict)
    for row in rows:
        lines[row.suite, row.rule][row.n] = row
    names = ["suite", "rule", *(f"n = {n}" for n in NS), "verifier tokens for a generated one", "cached", "scored"]
    cells = [[*names, "seconds for one of sampling"], ["---", "---", *["---:"] * (len(names) - 1)]]
    for (suite, rule), by_n in lines.items():
        one = next(iter(by_n.values()))
        costs = ["–"] * 4
        if rule != VOTE:
            shares = ["–" if share is None else f"{share:.0%}" for share in (one.cached, one.scored)]
            costs = [f"{one.more_tokens:.2f}", *shares, f"{one.seconds:.2f}"]
        cells.append([suite, rule, *(_describe(by_n.get(n)) for n in NS), *costs])
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def _describe(row: Row | None) -> str:
    """Return the accuracy and the gap that is closed with its interval; of the vote its accuracy and pass@n."""
    if row is None:
        return ""
    if row.rule == VOTE:
        return f"{row.accuracy:.3f} of {row.reached:.3f}"
    if row.gap is None:
        return f"{row.accuracy:.3f}"
    interval = "" if row.low is None else f" ({row.low:.2f} to {row.high:.2f})"
    return f"{row.accuracy:.3f}: {row.gap:.2f}{interval}"
