"""Many pairs of answers, each compared in both orders, and votes on all of them at once."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import pint
import pytest

from reasoner.answers.algebra import are_equal
from reasoner.answers.canonical import canonicalize
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.notation import units
from reasoner.answers.spec import AnswerSpec
from reasoner.answers.votes import group_equivalent
from reasoner.tree import Node
from tests.reasoner.answers.different_pairs import DIFFERENT
from tests.reasoner.answers.equal_pairs import EQUAL
from tests.seeds import shift

REGISTRY = pint.UnitRegistry(non_int_type=Fraction)


def compare(pair: str) -> set[bool]:
    """Return the verdicts in both orders."""
    a, b = map(canonicalize, pair.split(" | "))
    return {a == b or are_equal(a, b), b == a or are_equal(b, a)}


@pytest.mark.parametrize("kind", EQUAL)
def test_pairs_of_the_table_are_equal_in_both_orders(kind: str) -> None:
    assert [pair for pair in EQUAL[kind] if compare(pair) != {True}] == []


@pytest.mark.parametrize("kind", DIFFERENT)
def test_pairs_of_the_table_differ_in_both_orders(kind: str) -> None:
    assert [pair for pair in DIFFERENT[kind] if compare(pair) != {False}] == []


@pytest.mark.parametrize("kind", EQUAL)
def test_canonical_forms_of_the_table_are_stable(kind: str) -> None:
    answers = {answer for pair in (*EQUAL[kind], *DIFFERENT.get(kind, ())) for answer in pair.split(" | ")}
    assert [answer for answer in answers if canonicalize(canonicalize(answer)) != canonicalize(answer)] == []


@pytest.mark.parametrize("kind", EQUAL)
@pytest.mark.parametrize("size", [6, pytest.param(12, marks=pytest.mark.long)])
@pytest.mark.usefixtures("no_workers")
async def test_the_order_of_votes_does_not_change_the_classes(
    kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(self: Equivalence, a: str, b: str) -> bool:
        return are_equal(a, b)

    monkeypatch.setattr(Equivalence, "_ask_worker", ask)
    answers = [answer for pair in (*EQUAL[kind], *DIFFERENT.get(kind, ())) for answer in pair.split(" | ")]
    dice = random.Random(shift(kind))
    for _ in range(size // 4):
        some = dice.sample(answers, min(size, len(answers)))
        found = []
        for _ in range(2):
            dice.shuffle(some)
            nodes = [Node((index,), None, (), answer=answer) for index, answer in enumerate(some)]
            groups = await group_equivalent(nodes, AnswerSpec(), Equivalence())
            found.append(Counter(frozenset(str(node.answer) for node in group) for group in groups))
        assert found[0] == found[1]


def test_units_have_the_sizes_of_pint() -> None:
    """Every everyday unit of the table that pint has, too; its floats know nothing of fractions."""
    registry = pint.UnitRegistry()
    compared = 0
    for name, measure in units._MEASURES.items():
        known = {"°C": "delta_degC", "°F": "delta_degF", "°": "degree", "ton": "metric_ton", "lb": "pound"}.get(
            name, name
        )
        if known in registry and not {base for base, _ in measure.dimensions} & {"months", "level", "mornings"}:
            size = registry.Quantity(1, known).to_base_units()
            if {str(base) for base in size._units} == {base for base, _ in measure.dimensions}:
                assert float(measure.factor) == pytest.approx(size.magnitude, rel=1e-12), name
                compared += 1
    assert compared >= 25


@pytest.mark.parametrize("prefix", ["nano", "micro", "milli", "centi", "deci", "deca", "hecto", "kilo", "mega", "giga",
                                    "tera", "peta", "exa", "zetta", "yotta", "pico", "femto", "atto", "zepto", "yocto",
                                    "ronna", "quetta", "ronto", "quecto"])  # fmt: skip
@pytest.mark.parametrize("unit", ["meter", "watts", "pascals", "hertz", "ohms", "moles", "farads"])
def test_every_prefix_is_a_factor(prefix: str, unit: str) -> None:
    factor = Fraction(REGISTRY.Quantity(Fraction(1), prefix + "meter").to("meter").magnitude)
    ours, plain = units.read_unit(f" {prefix}{unit}"), units.read_unit(f" {unit}")
    assert units.are_same_amount(Fraction(5), ours, 5 * factor, plain)
    assert not units.are_same_amount(Fraction(5), ours, Fraction(5), plain)
