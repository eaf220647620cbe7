"""The measurements: styles that are read correctly, and pairs that are judged correctly in both orders."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.answers.pairs import DIFFERENT, EQUAL, NUMERIC
from benchmarks.answers.styles import CHOICES, STYLES, written
from reasoner.answers.canonical import canonicalize
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.extraction.extract import extract_answer
from reasoner.answers.spec import AnswerSpec
from reasoner.evaluation.suites.files.registry import open_file
from reasoner.jobs.rule_specs import NumericVerifier
from reasoner.verifiers.rules import is_within_tolerance

LONGEST = 64_000
HARD = (
    "$",
    "{",
    "}",
    "\\",
    "\\boxed{",
    "\\boxed ",
    "the answer is ",
    "answer",
    "answer: ",
    "<answer>",
    '"answer": ',
    "####\n",
    "\\frac{",
    "(",
    "**",
    "1,",
    "the answer to ",
    "答案",
    " ",
    "\n",
    "The answer is $18 and ",
)
"""Units that are repeated to texts of ``LONGEST`` characters, which are slow to search."""


@dataclass(slots=True)
class Count:
    """Counts of a class: right, wrong, and without an answer; ``bad`` are the first few that were not right."""

    right: int = 0
    wrong: int = 0
    none: int = 0
    bad: list[str] = field(default_factory=list)

    def add(self, right: bool | None, what: str) -> None:
        """Count one more; ``None``: no answer."""
        if right:
            self.right += 1
            return
        if right is None:
            self.none += 1
        else:
            self.wrong += 1
        if what not in self.bad and len(self.bad) < 5:
            self.bad.append(what)


def references(path: Path | None) -> list[str]:
    """Return the answers of a file in GSM8K's form, or numbers of every kind: whole, decimal, large, negative."""
    if path is not None:
        return [problem.answer for problem in open_file(path, None).problems]
    rng = random.Random(18)
    whole = [str(rng.randint(1, 10 ** rng.randint(1, 7))) for _ in range(60)]
    prices = [f"{rng.randint(1, 2000)}.{rng.randint(1, 99):02}" for _ in range(30)]
    return [*whole, *prices, *(f"-{rng.randint(1, 5000)}" for _ in range(10))]


async def measure_styles(numbers: list[str]) -> tuple[dict[str, dict[str, Count]], float]:
    """Return the counts by class for the rules ``numeric`` and ``math``, and the slowest extraction in seconds of
    processor time."""
    counts: dict[str, dict[str, Count]] = {}
    slowest = 0.0
    for kind, styles in STYLES.items():
        counts[kind] = {"numeric": Count(), "math": Count()}
        async with Equivalence() as equal:  # one for each class: a job's comparisons are limited
            for style in styles:
                for number in numbers:
                    text = written(style, number)
                    began = time.process_time()
                    answer = extract_answer(text)
                    slowest = max(slowest, time.process_time() - began)
                    rule = NumericVerifier(kind="numeric", expected=float(number) if "." in number else int(number))
                    counts[kind]["numeric"].add(None if answer is None else is_within_tolerance(answer, rule), style)
                    same = None if answer is None else await equal.equal(canonicalize(number), canonicalize(answer))
                    counts[kind]["math"].add(same, style)
    return counts, slowest


def measure_choices() -> Count:
    """Return the count of the styles of a chosen letter."""
    count = Count()
    for style in CHOICES:
        for letter in "ABCDEJ":
            answer = extract_answer("Let us see.\n\n" + style.format(l=letter), AnswerSpec(compare="choice"))
            count.add(None if answer is None else answer == letter, style)
    return count


async def measure_pairs() -> dict[str, dict[str, Count]]:
    """Return the counts of pairs that must be equal and that must differ, by class, each compared in both orders."""
    counts: dict[str, dict[str, Count]] = {"equal": {}, "different": {}}
    async with Equivalence() as equal:
        for verdict, classes in (("equal", EQUAL), ("different", DIFFERENT)):
            for kind, pairs in classes.items():
                count = counts[verdict][kind] = Count()
                for pair in pairs:
                    a, b = map(canonicalize, pair.split(" | "))
                    said = {await equal.equal(a, b), await equal.equal(b, a)}
                    count.add(said == {verdict == "equal"}, pair)
    for verdict, pairs in NUMERIC.items():
        count = counts[verdict]["rule numeric"] = Count()
        for pair in pairs:
            count.add(is_near(pair) == (verdict == "equal"), pair)
    return counts


def is_near(pair: str) -> bool:
    """Return True if the rule ``numeric`` accepts the pair "answer | number"."""
    answer, number = pair.split(" | ")
    return is_within_tolerance(answer, NumericVerifier(kind="numeric", expected=float(number)))


def measure_hard() -> dict[str, float]:
    """Return the processor seconds of extraction from texts that are slow to search, by their repeated unit."""
    found = {}
    for unit in HARD:
        text = unit * (LONGEST // len(unit))
        found[unit] = max(_seconds(text, AnswerSpec(compare=compare)) for compare in ("math", "text", "choice"))
    return found


def _seconds(text: str, how: AnswerSpec) -> float:
    began = time.process_time()
    extract_answer(text, how)
    return time.process_time() - began
