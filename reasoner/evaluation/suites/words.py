"""Word problems: a count that changes many times; every order of bookkeeping leads to the one right answer.

A problem is a sum of signed terms, some of them products ("buys 3 boxes of 24"). A solution keeps a running total
and may process the terms in any order and multiply at any time, so a problem has hundreds of valid solutions that
use different arithmetic facts and share only the answer. All quantities of a problem are different numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from reasoner.evaluation.suites.problem import Problem, Split, hash_problem, split_of

LEVELS: tuple[str, ...] = ("s10", "h8", "h10")
"""Names of the levels: ``sK`` has K arithmetic steps with two-digit quantities, ``hK`` K steps with up to 249."""

TEMPERATURE = 0.7
"""Sampling temperature with the best results of votes: solutions are diverse at any temperature, errors rarer at
this one."""

LIMIT = 499
GROUPS = range(2, 10)


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of the numbers in one kind of level."""

    quantities: range
    sizes: range
    largest_product: int


RANGES = {"s": Ranges(range(11, 100), range(4, 26), 120), "h": Ranges(range(21, 250), range(11, 60), 240)}

PEOPLE = (("Mia", "She"), ("Tom", "He"), ("Ana", "She"), ("Ben", "He"), ("Lea", "She"), ("Max", "He"))
ITEMS = ("beads", "stamps", "cards", "shells", "coins", "pens")
GAIN = ("finds {q} more", "buys {q}", "gets {q} from {friend}", "wins {q}")
LOSS = ("loses {q}", "sells {q}", "gives {q} to {friend}", "uses {q}")
GAIN_PRODUCT = ("buys {k} boxes of {m}", "finds {k} bags of {m}", "gets {m} from each of {k} friends")
LOSS_PRODUCT = ("gives {m} to each of {k} friends", "sells {k} bags of {m}", "uses {m} a day for {k} days")

Term = tuple[int, ...]
"""Signed term: (sign, quantity) or (sign, groups, size)."""


def generate_problem(split: Split, seed: int | str, level: str) -> Problem:
    """Generate a problem of this split and level, deterministically from the arguments."""
    rng = random.Random(f"words/{split}/{level}/{seed}")
    count = int(level[1:])
    while True:
        terms = _sample_terms(rng, count, RANGES[level[0]])
        if terms is not None and split_of(canonical(terms)) == split:
            return Problem(
                id=f"words-{level}-{hash_problem(canonical(terms)):016x}",
                suite="words",
                level=level,
                text=_write_question(rng, terms),
                answer=str(sum(signed(term) for term in terms)),
                data={"terms": [list(term) for term in terms]},
            )


def canonical(terms: Sequence[Term]) -> str:
    return "words:" + ";".join(",".join(map(str, term)) for term in sorted(terms))


def value(term: Term) -> int:
    return term[1] if len(term) == 2 else term[1] * term[2]


def signed(term: Term) -> int:
    return term[0] * value(term)


def _sample_terms(rng: random.Random, steps: int, ranges: Ranges) -> list[Term] | None:
    """Sample terms that take this many steps, in the order of the text; ``None`` if the sample breaks a rule."""
    products = min(rng.choice((0, 1, 1, 2)), steps // 2)
    terms: list[Term] = []
    for index in range(steps + 1 - products):
        sign = 1 if index == 0 or rng.random() < 0.55 else -1
        if 0 < index <= products:
            term: Term = (sign, rng.choice(GROUPS), rng.choice(ranges.sizes))
        else:
            term = (sign, rng.choice(ranges.quantities))
        terms.append(term)
    tail = terms[1:]
    rng.shuffle(tail)
    terms[1:] = tail
    shown = [number for term in terms for number in term[1:]] + [value(term) for term in terms if len(term) == 3]
    total = 0
    for term in terms:
        total += signed(term)
        if total <= 0:
            return None
    if len(set(shown)) < len(shown) or any(value(term) > ranges.largest_product for term in terms):
        return None
    return terms if sum(value(term) for term in terms if term[0] > 0) <= LIMIT else None


def _write_question(rng: random.Random, terms: Sequence[Term]) -> str:
    name, pronoun = rng.choice(PEOPLE)
    friend = rng.choice([person for person, _ in PEOPLE if person != name])
    item = rng.choice(ITEMS)
    sentences = [f"{name} has {terms[0][1]} {item}."]
    for term in terms[1:]:
        if len(term) == 2:
            phrase = rng.choice(GAIN if term[0] > 0 else LOSS).format(q=term[1], friend=friend)
        else:
            phrase = rng.choice(GAIN_PRODUCT if term[0] > 0 else LOSS_PRODUCT).format(k=term[1], m=term[2])
        sentences.append(f"{pronoun} {phrase}.")
    return " ".join([*sentences, f"How many {item} does {name} have now?"])


def check(problem: Problem, answer: str | None) -> bool:
    """Return True if the answer is the right number."""
    if answer is None:
        return False
    text = answer.strip()
    return text.isascii() and text.isdigit() and len(text) <= 9 and int(text) == int(problem.answer)
