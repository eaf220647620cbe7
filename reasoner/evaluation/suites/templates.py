"""Templates of the suite ``arithmetic``: a text in several wordings, its numbers, and the operations that answer it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["add", "subtract", "multiply", "divide", "remainder", "percent"]
"""Kind of an operation; ``divide`` comes out whole, and ``percent`` is the right one's percentage of the left one."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Range of a number of a template: its digits, and a number of which it is a multiple."""

    fewest: int
    most: int
    multiple: int = 1

    def sample(self, rng: random.Random) -> int:
        """Sample the number of digits, then a number with so many."""
        digits = rng.randint(self.fewest, self.most)
        number = rng.randrange(10 ** (digits - 1), 10**digits)
        return max(number - number % self.multiple, self.multiple)

    def accepts(self, number: int) -> bool:
        return number > 0 and self.fewest <= len(str(number)) <= self.most


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on numbers of the text and results of earlier operations."""

    name: str
    """Name of the result, such as ``total``."""
    left: str
    kind: Kind
    right: str

    def apply(self, left: int, right: int) -> int:
        match self.kind:
            case "add":
                return left + right
            case "subtract":
                return left - right
            case "multiply":
                return left * right
            case "divide":
                return left // right
            case "remainder":
                return left % right
            case "percent":
                return left * right // 100


@dataclass(frozen=True, slots=True)
class Template:
    """Wordings of a problem with its numbers and operations; the last operation's result is the answer."""

    name: str
    texts: tuple[str, ...]
    slots: dict[str, Slot]
    operations: tuple[Operation, ...]
    things: tuple[str, ...] = ("",)
    adjusted: tuple[str, int] | None = None
    """Slot that is changed by the remainder, with the sign of the change, so that the division comes out whole."""


NAMES = (
    *("Mia", "Tom", "Ana", "Ben", "Lea", "Max", "Nora", "Paul", "Ida", "Karl", "Emma", "Luis", "Sara", "Hugo", "Vera"),
    *("Oskar", "Julia", "Peter", "Clara", "Simon", "Alma", "Felix", "Rosa", "David"),
)
GOODS = (
    *(
        "bolts",
        "bricks",
        "candles",
        "pencils",
        "tiles",
        "bottles",
        "screws",
        "lamps",
        "toys",
        "books",
        "plates",
        "cups",
    ),
    *("chairs", "shirts", "batteries", "stamps", "coins", "beads", "nails"),
)
CROPS = ("apples", "lemons", "onions", "potatoes", "melons", "tomatoes", "oranges", "eggs", "pears", "carrots")
PLACES = ("town", "club", "school", "museum", "company", "library", "hospital", "village")

QUANTITY = Slot(4, 7)
LARGE = Slot(6, 9)
FACTOR = Slot(2, 4)
DIVISOR = Slot(2, 4)
PERCENTAGE = Slot(1, 2, 5)
MONEY = Slot(4, 8, 20)
"""Multiple of 20, so that five, ten and more percent of it come out whole."""


def _parse_operations(*lines: str) -> tuple[Operation, ...]:
    """Return operations from lines such as ``total = a add b``."""
    pieces = [line.split() for line in lines]
    kinds: dict[str, Kind] = {
        "+": "add", "-": "subtract", "*": "multiply", "/": "divide", "%": "remainder", "percent": "percent",
    }  # fmt: skip
    return tuple(Operation(name, left, kinds[kind], right) for name, _, left, kind, right in pieces)


_TWO = (
    Template(
        "shipment",
        (
            "A factory makes {a} {things} a day. After {b} days it ships {c} of them. How many {things} are left?",
            "A workshop has shipped {c} {things}. It has made {a} {things} a day for {b} days. How many {things} "
            "does it still have?",
            "{name} runs a plant that makes {a} {things} every day. In {b} days, {c} {things} are thrown away. "
            "How many good {things} does the plant make in that time?",
        ),
        {"a": QUANTITY, "b": FACTOR, "c": QUANTITY},
        _parse_operations("made = a * b", "left = made - c"),
        GOODS,
    ),
    Template(
        "crates",
        (
            "A depot has {a} {things} and gets {b} more. All are packed in crates of {c}. How many {things} do not "
            "fill a crate?",
            "{name} has {a} {things} and {friend} has {b}. They pack them together in bags of {c}, as many full bags "
            "as there can be. How many {things} remain?",
        ),
        {"a": LARGE, "b": LARGE, "c": DIVISOR},
        _parse_operations("total = a + b", "rest = total % c"),
        GOODS,
    ),
    Template(
        "tax",
        (
            "{name} earns {a} euros and pays {p} percent of it as tax. How many euros does {name} keep?",
            "A fund pays {p} percent of its money to {name}. It had {a} euros before. How many euros remain in "
            "the fund?",
        ),
        {"a": MONEY, "p": PERCENTAGE},
        _parse_operations("tax = a percent p", "kept = a - tax"),
    ),
    Template(
        "schools",
        (
            "{name} collects {a} euros and {friend} collects {b}. They share the money equally among {c} {things}. "
            "How many euros does each of the {things} get?",
            "In one year {a} trees were planted and in the next {b}. The same number stands in each of {c} parks. "
            "How many trees stand in each park?",
        ),
        {"a": LARGE, "b": LARGE, "c": DIVISOR},
        _parse_operations("total = a + b", "each = total / c"),
        ("schools", "clubs", "towns", "villages", "museums"),
        ("b", -1),
    ),
    Template(
        "stock",
        (
            "A store has {a} {things} and buys {b} boxes of {c}. How many {things} does it have now?",
            "{name} buys {b} packs with {c} {things} each and already had {a} {things}. How many {things} are there "
            "in all?",
        ),
        {"a": LARGE, "b": QUANTITY, "c": FACTOR},
        _parse_operations("bought = b * c", "total = a + bought"),
        GOODS,
    ),
    Template(
        "pumps",
        (
            "One pump moves {a} litres an hour and another moves {b}. How many more litres does the first move in {c} "
            "hours?",
            "{name} walks {b} steps a month and {friend} walks {a}. How many more steps does {friend} walk in {c} "
            "months?",
        ),
        {"a": LARGE, "b": Slot(4, 6), "c": FACTOR},
        _parse_operations("gap = a - b", "more = gap * c"),
    ),
    Template(
        "product",
        (
            "What is {a} times {b}, minus {c}?",
            "Multiply {a} by {b}, then subtract {c}. What do you get?",
        ),
        {"a": QUANTITY, "b": QUANTITY, "c": LARGE},
        _parse_operations("product = a * b", "result = product - c"),
    ),
)

_THREE = (
    Template(
        "harvest",
        (
            "A farm picks {a} {things} in spring and {b} in summer. It sells {c} of them and packs the others in "
            "{d} equal crates. How many {things} are in each crate?",
            "{name} picks {a} {things} and {friend} picks {b}. They lose {c} {things} and share the others equally "
            "among {d} shops. How many {things} does each shop get?",
        ),
        {"a": LARGE, "b": LARGE, "c": QUANTITY, "d": DIVISOR},
        _parse_operations("total = a + b", "left = total - c", "each = left / d"),
        CROPS,
        ("c", 1),
    ),
    Template(
        "tickets",
        (
            "A hall sells {a} tickets at {b} euros each and {c} tickets at {d} euros each. How many euros is that in "
            "all?",
            "{name} buys {a} {things} for {b} cents each and {c} lamps for {d} cents each. How many cents does "
            "{name} pay?",
        ),
        {"a": QUANTITY, "b": FACTOR, "c": QUANTITY, "d": FACTOR},
        _parse_operations("first = a * b", "second = c * d", "total = first + second"),
        GOODS,
    ),
    Template(
        "income",
        (
            "{name} earns {a} euros at one job and {b} at another, and pays {p} percent of all as tax. How many "
            "euros does {name} keep?",
            "A {things} gets {a} euros from its members and {b} from the state. It spends {p} percent of all on rent. "
            "How many euros are left?",
        ),
        {"a": MONEY, "b": MONEY, "p": PERCENTAGE},
        _parse_operations("total = a + b", "part = total percent p", "left = total - part"),
        PLACES,
    ),
    Template(
        "packing",
        (
            "A machine makes {a} {things} a day for {b} days. Then {c} are thrown away and the others are packed in "
            "boxes of {d}. How many {things} do not fill a box?",
            "{name} gets {b} loads of {a} {things} and gives {c} {things} to {friend}. The others go into bags of {d}. "
            "How many {things} remain when all bags are full?",
        ),
        {"a": QUANTITY, "b": FACTOR, "c": QUANTITY, "d": DIVISOR},
        _parse_operations("made = a * b", "good = made - c", "rest = good % d"),
        GOODS,
    ),
    Template(
        "budget",
        (
            "A {things} has {a} euros. It buys {b} lamps at {c} euros each and pays {d} euros for repairs. How many "
            "euros are left?",
            "After {name} has paid {d} euros for a roof and bought {b} windows for {c} euros each, how many of {a} "
            "euros are left?",
        ),
        {"a": Slot(8, 9), "b": Slot(4, 5), "c": FACTOR, "d": QUANTITY},
        _parse_operations("lamps = b * c", "left = a - lamps", "rest = left - d"),
        PLACES,
    ),
    Template(
        "sum",
        (
            "Add {a} and {b}, multiply the sum by {c}, and subtract {d}. What do you get?",
            "What is the sum of {a} and {b}, times {c}, minus {d}?",
        ),
        {"a": QUANTITY, "b": QUANTITY, "c": QUANTITY, "d": LARGE},
        _parse_operations("total = a + b", "product = total * c", "result = product - d"),
    ),
)

_FOUR = (
    Template(
        "warehouse",
        (
            "A warehouse has {a} {things} and gets {b} boxes of {c}. It sells {d} of the {things} and shares the "
            "others equally among {e} shops. How many {things} does each shop get?",
            "{name} has {a} {things}, buys {b} bags of {c}, loses {d} {things} and puts the others into {e} equal "
            "piles. How many {things} are in each pile?",
        ),
        {"a": LARGE, "b": QUANTITY, "c": FACTOR, "d": QUANTITY, "e": DIVISOR},
        _parse_operations("bought = b * c", "total = a + bought", "left = total - d", "each = left / e"),
        GOODS,
        ("d", 1),
    ),
    Template(
        "factories",
        (
            "One factory makes {a} {things} a day for {b} days, another {c} a day for {d} days. All are packed in "
            "boxes of {e}. How many {things} do not fill a box?",
            "{name} sends {b} loads of {a} {things} and {friend} sends {d} loads of {c}. They are packed in crates of "
            "{e}. How many {things} remain?",
        ),
        {"a": QUANTITY, "b": FACTOR, "c": QUANTITY, "d": FACTOR, "e": DIVISOR},
        _parse_operations("first = a * b", "second = c * d", "total = first + second", "rest = total % e"),
        GOODS,
    ),
    Template(
        "club",
        (
            "A {things} gets {a} euros from its members and {b} from the state. It spends {p} percent of all on rent "
            "and {c} euros on repairs. How many euros are left?",
            "{name} earns {a} euros at one job and {b} at another, pays {p} percent of all as tax, and spends {c} "
            "euros. How many euros remain?",
        ),
        {"a": MONEY, "b": MONEY, "p": PERCENTAGE, "c": QUANTITY},
        _parse_operations("total = a + b", "part = total percent p", "left = total - part", "rest = left - c"),
        PLACES,
    ),
    Template(
        "orchard",
        (
            "A farm has {b} fields with {a} {things} each. It loses {c} {things} and sells the others for {d} cents "
            "each. Its costs are {e} cents. How many cents does it earn?",
            "{name} grows {a} {things} in each of {b} years, eats {c} of them, sells the others at {d} cents each and "
            "pays {e} cents for water. How many cents does {name} make?",
        ),
        {"a": Slot(4, 6), "b": FACTOR, "c": QUANTITY, "d": FACTOR, "e": LARGE},
        _parse_operations("grown = a * b", "good = grown - c", "income = good * d", "profit = income - e"),
        CROPS,
    ),
    Template(
        "surplus",
        (
            "A new machine makes {a} {things} an hour and an old one {b}. Both run for {c} hours. The surplus of the "
            "new one and {d} more {things} are shared equally among {e} shops. How many {things} does each shop get?",
            "One ship brings {a} {things} a trip and a smaller one {b}. They make {c} trips each. The difference and "
            "{d} more {things} are shared equally among {e} towns. How many {things} does each town get?",
        ),
        {"a": Slot(6, 7), "b": Slot(4, 6), "c": FACTOR, "d": QUANTITY, "e": DIVISOR},
        _parse_operations("gap = a - b", "more = gap * c", "total = more + d", "each = total / e"),
        GOODS,
        ("d", -1),
    ),
    Template(
        "chain",
        (
            "Multiply {a} by {b} and {c} by {d}, subtract the second product from the first, and add {e}. What do you "
            "get?",
            "What is {a} times {b}, minus {c} times {d}, plus {e}?",
        ),
        {"a": QUANTITY, "b": QUANTITY, "c": QUANTITY, "d": FACTOR, "e": LARGE},
        _parse_operations("first = a * b", "second = c * d", "gap = first - second", "result = gap + e"),
    ),
)

TEMPLATES = {template.name: template for template in (*_TWO, *_THREE, *_FOUR)}
