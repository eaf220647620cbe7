"""Arithmetic that is compared at once: algebra gives the same verdicts, and what it is not is left to algebra."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from reasoner.answers import algebra, arithmetic, plain
from reasoner.answers.normalize import normalize
from tests.seeds import shift


def formula(dice: random.Random, depth: int) -> str:
    if depth == 0 or dice.random() < 0.2:
        return str(dice.choice((0, 1, 2, 3, 7, 12, 25, 100)))
    left, right = formula(dice, depth - 1), formula(dice, depth - 1)
    text = f"{left}{dice.choice(['+', '-', '*', '/', chr(92) + 'times ', ' + '])}{right}"
    return f"({text})" if dice.random() < 0.6 else dice.choice(["", "", "-"]) + text


def test_verdicts_on_random_formulas_are_those_of_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(shift(0))
    pairs = [(normalize(formula(dice, 2)), normalize(formula(dice, dice.choice((0, 1, 2))))) for _ in range(60)]
    # Equal ones are rare by chance.
    values = {text: value for text, _ in pairs if (value := arithmetic.evaluate(text)) is not None}
    pairs += [(text, str(value)) for text, value in values.items()]
    verdicts = [plain.decide_equal(*pair) for pair in pairs]
    monkeypatch.setattr(arithmetic, "evaluate", lambda _: None)
    decided = [(pair, verdict) for pair, verdict in zip(pairs, verdicts, strict=True) if verdict is not None]
    for (a, b), verdict in decided:
        assert (a == b or algebra.are_equal(a, b)) == verdict, (a, b)
    assert sum(verdict for _, verdict in decided) > 20
    assert sum(not verdict for _, verdict in decided) > 20


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2-3-4", Fraction(-5)),
        ("12/4*3", Fraction(9)),
        ("1/2/3", Fraction(1, 6)),
        ("2*-(3-4)", Fraction(2)),
        (r"2\times(3+4)\div7", Fraction(2)),
    ],
)
def test_operators_have_the_usual_precedence(text: str, value: Fraction) -> None:
    assert arithmetic.evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    ["2(3+4)", "2**3", "7//2", "1.5+1", "1,000+5", "1/(2-2)", "x+1", "(1+2", "1 2", "007+1", "", "(" * 150, "1+" * 99],
)
def test_anything_else_is_left_to_algebra(text: str) -> None:
    assert arithmetic.evaluate(text) is None


def test_values_that_differ_by_little_differ() -> None:
    assert plain.decide_equal("10000000000+1", "10000000000+2") is False
    assert plain.decide_equal("1-2/3", "333333/1000000") is False
    assert plain.decide_equal("1-2/3", "1/3") is True
    assert plain.decide_equal("1-2/3", "0.333333") is None  # algebra compares rounded decimals
    assert plain.decide_equal("1-2/3", "1/3 cm") is None
