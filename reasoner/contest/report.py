"""The report of a contest: what each problem took, what was right, and what more time would buy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reasoner.answers.equivalence import Equivalence
from reasoner.contest.answers import read_whole_number
from reasoner.contest.contest import Outcome
from reasoner.contest.problems import ContestProblem
from reasoner.evaluation.statistics import wilson_interval
from reasoner.evaluation.suites.suite import Suite

HOUR = 3600.0
EXPLANATION = (
    "*Expected gain*: by how much one more solution is expected to raise the probability of a right answer, as the "
    "allocator estimates it: the probability that the leading answer is wrong, times the probability that a new "
    "solution is right. *Another hour* goes on in this way with the tokens that an hour has bought so far, always with "
    "the largest gain per token; of a problem with s solutions the chance of the k-th further one is taken to fall as "
    "(s + 2) / (s + 2 + k), as if none of them brought news. Agreement of samples counts as evidence, so where a model "
    "is wrong with confidence the estimate is too low, and where it can only guess too high."
)


async def check_answers(
    problems: Sequence[ContestProblem], outcomes: Mapping[str, Outcome], modulo: int | None, suite: Suite | None
) -> dict[str, bool]:
    """Return whether the answers of problems with a known one are right: by the suite's rule, else as in a vote.

    With ``modulo`` whole numbers are compared.
    """
    right = {}
    async with Equivalence() as equal:
        for problem in problems:
            if problem.answer is None and suite is None:
                continue
            outcome = outcomes.get(problem.id)
            answer = None if outcome is None else outcome.answer
            known = read_whole_number(problem.answer or "") if modulo is not None else None
            if answer is None:
                right[problem.id] = False
            elif suite is not None and problem.source is not None:
                right[problem.id] = await suite.check(problem.source, answer, equal)
            elif known is not None:
                right[problem.id] = read_whole_number(answer) == known
            else:
                right[problem.id] = await equal.are_same(answer, problem.answer or "")
    return right


def build_report(
    header: Mapping[str, Any],
    problems: Sequence[ContestProblem],
    outcomes: Mapping[str, Outcome],
    right: Mapping[str, bool],
    seconds: float,
) -> dict[str, Any]:
    """Return the document: totals, accuracy where answers are known, another hour, and a row for each problem."""
    spent = sum(outcome.tokens for outcome in outcomes.values())
    hourly = int(spent / max(seconds, 1e-9) * HOUR)
    rows = [
        asdict(outcomes[problem.id]) | {"right": right.get(problem.id), "expected": problem.answer}
        for problem in problems
        if problem.id in outcomes
    ]
    document: dict[str, Any] = {
        **header,
        "ended": len(outcomes),
        "answered": sum(outcome.answer is not None for outcome in outcomes.values()),
        "failed": sum(outcome.is_failed for outcome in outcomes.values()),
        "spent_tokens": spent,
        "spent_seconds": seconds,
        "another_hour": {"tokens": hourly, "expected_right": predict_gain(outcomes.values(), hourly)},
        "problems": rows,
    }
    if right:
        low, high = wilson_interval(sum(right.values()) / len(right), len(right))
        document["accuracy"] = {"known": len(right), "right": sum(right.values()), "low": low, "high": high}
    return document


def predict_gain(outcomes: Iterable[Outcome], tokens: int) -> float:
    """Return by how many the number of right answers is expected to rise with further tokens (``EXPLANATION``)."""
    open_ = [_Prediction(outcome) for outcome in outcomes if not outcome.is_failed]
    total = 0.0
    while open_:
        best = max(open_, key=lambda one: one.gain / one.tokens)
        if best.tokens > tokens or best.gain <= 0.0:
            open_.remove(best)
            continue
        tokens -= best.tokens
        total += best.take()
    return total


class _Prediction:
    """A problem with further solutions that bring no news."""

    def __init__(self, outcome: Outcome) -> None:
        self.tokens = outcome.sample_tokens
        self._wrong, self._chance = outcome.wrong, outcome.chance
        self._samples, self._more = outcome.samples, 0

    @property
    def gain(self) -> float:
        """The expected gain of the next solution."""
        return self._wrong * self._chance * (self._samples + 2) / (self._samples + 2 + self._more)

    def take(self) -> float:
        """Return the gain of the next solution, after which the leading answer is less likely to be wrong."""
        gain = self.gain
        self._wrong -= gain
        self._more += 1
        return gain


def write_report(folder: Path, document: Mapping[str, Any]) -> None:
    """Write ``report.json`` and ``report.md``."""
    for name, text in (("report.json", json.dumps(document, indent=2)), ("report.md", format_report(document))):
        partial = folder / f"{name}.partial"
        partial.write_text(text.rstrip("\n") + "\n")
        partial.replace(folder / name)


def format_report(document: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    hour, rows = document["another_hour"], document["problems"]
    lines = [
        f"    {document['origin']['command']}",
        "",
        f"{document['file']}: {document['num_problems']} problems, {document['tokens']:,} tokens and "
        f"{document['hours']:g} hours for all of them; {document['model']}, "
        f"`{json.dumps(document['strategy'])}`. {document['origin']['processor']}, {document['origin']['cores']} "
        f"cores, commit {document['origin']['commit']}.",
        "",
        f"Ended: {document['ended']}, with an answer {document['answered']}, cannot run {document['failed']}. Spent: "
        f"{document['spent_tokens']:,} tokens, {_format_seconds(document['spent_seconds'])}.",
        "",
    ]
    if "accuracy" in document:
        found = document["accuracy"]
        share = found["right"] / found["known"]
        lines += [
            f"Right: {found['right']} of {found['known']} ({share:.0%}; 95 % interval {found['low']:.0%} to "
            f"{found['high']:.0%}).",
            "",
        ]
    lines += [
        f"Another hour: {hour['tokens']:,} tokens at the rate so far, {hour['expected_right']:.2f} further right "
        "answers expected.",
        "",
        "| problem | answer | right | confidence | solutions | tokens | seconds | expected gain | ended by |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    lines += [_format_row(row) for row in sorted(rows, key=lambda row: -row["tokens"])]
    return "\n".join([*lines, "", EXPLANATION, ""])


def _format_row(row: Mapping[str, Any]) -> str:
    right = {True: "yes", False: f"no: {row['expected']}", None: ""}[row["right"]]
    confidence = "" if row["confidence"] is None else f"{row['confidence']:.2f}"
    cells = [row["id"], row["answer"] or "–", right, confidence, str(row["samples"]), f"{row['tokens']:,}"]
    cells += [f"{row['seconds']:.1f}", f"{row['wrong'] * row['chance']:.3f}", row["reason"]]
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
