"""Units after a number: parsing and comparison.

A missing unit matches any unit (18 equals 18 dollars and 18 dollars a day), and a counted noun is no unit (18 eggs
equals 18). Two stated units must agree: 3 cm differs from 3 m, but 300 cm equals it. A missing denominator also
matches any: 60 miles equals 60 miles per hour, which differs from 60 miles per second. Pounds of money and of mass are
one unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_TABLE = """
length mm 1/1000 millimeter millimetre
length cm 1/100 centimeter centimetre
length m 1 meter metre
length km 1000 kilometer kilometre
length inch 127/5000 in inches
length ft 381/1250 foot feet
length yd 1143/1250 yard yds
length mile 201168/125 mi
mass mg 1/1000000 milligram
mass g 1/1000 gram gm
mass kg 1 kilogram kgs
mass oz 28349523125/1000000000000 ounce
mass lb 45359237/100000000 pound lbs £ gbp
mass ton 1000 tonne
time s 1 sec second
time min 60 minute mins
time h 3600 hr hour hrs
time day 86400
time week 604800
months month 1
months year 12 yr yrs
volume mL 1/1000 ml milliliter millilitre
volume L 1 liter litre
gallons quart 1/4 qt
gallons gallon 1 gal
dollars cent 1/100 ¢ cents
dollars dollar 1 $ usd bucks buck
euros euro 1 € eur
yen yen 1 ¥ jpy
yuan yuan 1 rmb cny
rupees rupee 1 ₹ inr rs
angle degree 1 ° deg
radians radian 1 rad
celsius °C 1 celsius
fahrenheit °F 1 fahrenheit
mornings am 1 a.m
afternoons pm 1 p.m
speed mph 1397/3125
speed kph 5/18
force N 1 newton
energy J 1 joule
power W 1 watt
tension V 1 volt
"""
CURRENCIES = "$€£¥₹"
_SKIPPED = frozenset(("us", "american", "canadian", "whole", "full", "total", "additional", "extra"))
_AREA = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWER_WORDS = {"squared": 2, "cubed": 3}
_PER = frozenset(("per", "/", "a", "an", "each", "every"))
_TOKEN = re.compile(r"°[CF]\b|[a-z]\.m\.?|[A-Za-z]+(?:['\u2019-][A-Za-z]+)*|\^\d|[/$€£¥₹¢°]", re.IGNORECASE)
_PREPOSITION = re.compile(r"\s*in\s+[A-Za-z]")
"""Pattern of the preposition in "18 in total", which is not inches."""
_SPEEDS = {"mph": ("mile", "h"), "kph": ("km", "h")}


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit with numerator ``above`` and denominator ``below``, each ``""`` if missing."""

    above: str = ""
    power: int = 1
    below: str = ""
    below_power: int = 1

    def __str__(self) -> str:
        above = self.above + (f"^{self.power}" if self.power > 1 else "")
        below = self.below + (f"^{self.below_power}" if self.below_power > 1 else "")
        return above + (f"/{below}" if below else "")


NO_UNIT = Unit()


def _measures() -> dict[str, tuple[str, str, Fraction]]:
    found: dict[str, tuple[str, str, Fraction]] = {}
    for line in _TABLE.split("\n"):
        if line:
            kind, name, factor, *others = line.split()
            for word in (name, *others):
                found[word] = (name, kind, Fraction(factor))
                if len(word) > 2 and word.isalpha():
                    found.setdefault(word + "s", found[word])
    return found


_MEASURES = _measures()


def parse_measure(word: str) -> str | None:
    """Return the canonical name of a unit word; case matters for single letters only."""
    measure = _MEASURES.get(word) or (_MEASURES.get(word.lower().rstrip(".")) if len(word) > 1 else None)
    return measure[0] if measure else None


@lru_cache(maxsize=4096)
def read_unit(text: str) -> Unit:
    """Return the unit at the beginning of the text after a number; ``NO_UNIT`` if it is only a counted noun."""
    if _PREPOSITION.match(text):
        return NO_UNIT
    words = [word for word in _TOKEN.findall(text) if word.lower() not in _SKIPPED]
    above, power, at = _one(words, 0)
    if above in _SPEEDS and power == 1:
        return Unit(_SPEEDS[above][0], 1, _SPEEDS[above][1])
    below, below_power = "", 1
    if at < len(words) and words[at].lower() in _PER:
        below, below_power, _ = _one(words, at + 1)
    return Unit(above, power, below, below_power)


def _one(words: list[str], at: int) -> tuple[str, int, int]:
    """Return one measure, its power, and the index after it."""
    power = 1
    if at < len(words) and words[at].lower() in _AREA and at + 1 < len(words) and parse_measure(words[at + 1]):
        power = _AREA[words[at].lower()]
        at += 1
    name = parse_measure(words[at]) if at < len(words) else None
    if name is None:
        return "", 1, at
    at += 1
    if name == "degree" and at < len(words) and parse_measure(words[at]) in ("°C", "°F"):
        name = str(parse_measure(words[at]))
        at += 1
    if at < len(words) and (words[at][0] == "^" or words[at].lower() in _POWER_WORDS):
        power = int(words[at][1]) if words[at][0] == "^" else _POWER_WORDS[words[at].lower()]
        at += 1
    return name, power, at


def are_same_amount(a: Fraction, unit: Unit, b: Fraction, other: Unit) -> bool:
    """Return True if two amounts are equal by the rules of this module."""
    if unit == other:
        return a == b
    above = _ratio(unit.above, unit.power, other.above, other.power)
    below = _ratio(unit.below, unit.below_power, other.below, other.below_power)
    return above is not None and below is not None and a * above == b * below


def convert(unit: Unit, other: Unit) -> Fraction | None:
    """Return the factor from one unit to the other; ``None`` if they measure different quantities."""
    if not unit.above or not other.above or unit.below or other.below:
        return None
    return _ratio(unit.above, unit.power, other.above, other.power)


def _ratio(name: str, power: int, other: str, other_power: int) -> Fraction | None:
    """Return the factor from one measure to the other; ``None`` for different quantities, 1 if one is missing."""
    if not name or not other:
        return Fraction(1)
    _, kind, factor = _MEASURES[name]
    _, other_kind, other_factor = _MEASURES[other]
    if kind != other_kind or power != other_power:
        return None
    return (factor / other_factor) ** power
