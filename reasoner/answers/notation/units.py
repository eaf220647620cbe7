"""Units after a number: parsing and comparison.

A missing unit matches any unit (18 equals 18 dollars and 18 dollars a day). Two stated units must agree: 3 cm differs
from 3 m, but 300 cm equals it. A missing denominator also matches any: 60 miles equals 60 miles per hour, which differs
from 60 miles per second. Pounds of money and of mass are one unit.

Everyday units are in a table here, all others are pint's, which is imported when one of them has to be compared. A word
that neither knows is compared as a whole: 5 flurbs differ from 5 kiloflurbs, and 18 eggs equal 18 duck eggs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

_DIMENSIONS = {
    "length": "meter",
    "mass": "kilogram",
    "time": "second",
    "volume": "meter^3",
    "temperature": "kelvin",
    "force": "kilogram meter second^-2",
    "energy": "kilogram meter^2 second^-2",
    "power": "kilogram meter^2 second^-3",
    "tension": "kilogram meter^2 second^-3 ampere^-1",
}
"""Base units of the kinds in the table, as pint names them; any other kind is a base unit of its own."""
_TABLE = """
length mm 1/1000 millimeter millimetre 毫米
length cm 1/100 centimeter centimetre 厘米
length m 1 meter metre 米
length km 1000 kilometer kilometre 公里 千米
length inch 127/5000 in inches
length ft 381/1250 foot feet
length yd 1143/1250 yard yds
length mile 201168/125 mi
mass mg 1/1000000 milligram 毫克
mass g 1/1000 gram gm 克
mass kg 1 kilogram kgs 千克 公斤
mass oz 28349523125/1000000000000 ounce
mass lb 45359237/100000000 pound lbs £ gbp
mass ton 1000 tonne 吨
time s 1 sec second 秒
time min 60 minute mins 分钟
time h 3600 hr hour hrs 小时
time day 86400 天
time week 604800
months month 1
months year 12 yr yrs 岁 年
months decade 120
months century 1200 centuries
volume mL 1/1000000 ml milliliter millilitre 毫升
volume L 1/1000 liter litre 升
volume quart 473176473/500000000000 qt
volume gallon 473176473/125000000000 gal
dollars cent 1/100 ¢ cents
dollars dollar 1 $ usd bucks buck
euros euro 1 € eur
yen yen 1 ¥ jpy
yuan yuan 1 rmb cny
rupees rupee 1 ₹ inr rs
angle degree 1 ° deg
radians radian 1 rad
temperature °C 1 celsius
temperature °F 5/9 fahrenheit
temperature K 1 kelvin
mornings am 1 a.m
afternoons pm 1 p.m
force N 1 newton
energy J 1 joule
power W 1 watt
tension V 1 volt
level dB 1 decibel
"""
_OFFSETS = {"°C": Fraction(27315, 100), "°F": Fraction(45967, 180), "K": Fraction(0)}
"""Kelvins at zero degrees."""
CURRENCIES = "$€£¥₹"
_SKIPPED = frozenset(
    ("us", "american", "canadian", "whole", "full", "total", "additional", "extra", "st", "nd", "rd", "th")
)
_AREA = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWER_WORDS = {"squared": 2, "cubed": 3}
_PER = frozenset(("per", "/", "a", "an", "each", "every"))
_NO_NOUN = frozenset(
    ("of", "in", "at", "on", "by", "for", "from", "to", "with", "is", "are", "was", "were", "be", "it", "as", "that",
     "which", "who", "we", "he", "she", "they", "has", "have", "left", "remaining", "more", "less", "fewer", "other",
     "times", "time", "altogether", "overall", "together", "and", "or", "if", "than", "the", "so", "about", "because")
)  # fmt: skip
"""Words at which the counted noun after a number ends."""
_TOKEN = re.compile(
    r"°\s?[CF]\b|[a-z]\.m\.?|[A-Za-zµΩ]+(?:['\u2019-][A-Za-z]+)*|\^\{?\s?-?\d\s?\}?|\\cdot|[*/()$€£¥₹¢°]|[\u4e00-\u9fff]+",
    re.IGNORECASE,
)
_PREPOSITION = re.compile(r"\s*in\s+[A-Za-z]")
"""Pattern of the preposition in "18 in total", which is not inches."""
_SPEEDS = {"mph": ("mile", "h"), "kph": ("km", "h")}
SYMBOL = re.compile(
    r"(?!as$)(?:da|[yzafpnµumcdhkMGTPEZY])(?:[mgsAKNJWVLlBΩFHTCS]|Da)|[mgsAKNJWVLΩ]|[KMGT]iB|[kMGT]b|ha|hp|kn"
    r"|(?:da|[yzafpnµumcdhkMGTPEZY])?(?:mol|Hz|Pa|eV|lm|lx|Bq|Gy|Sv|Wb|Wh|cal|bar)"
)
"""Pattern of a unit's symbol, with its prefix."""
_GLUED_SYMBOL = re.compile(r"[µknpmcMGTh]?(?:Hz|Pa|eV|Wh|mol|cal|bar|[WVΩJN]|[KMGT]i?B)|µ[gmslLAF]|[kmM]A")
"""Pattern of a symbol that is no product of variables right after a number: 5kW, but not 5nm."""

Power = tuple[str, int]
Finder = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: the measures with their powers above and below the fraction line, or a ``noun`` that is no measure."""

    above: tuple[Power, ...] = ()
    below: tuple[Power, ...] = ()
    noun: str = ""

    def __str__(self) -> str:
        written = " ".join(_write_power(*power) for power in self.above) or self.noun
        return written + "".join(f"/{_write_power(*power)}" for power in self.below)


@dataclass(frozen=True, slots=True)
class Measure:
    """The size of a measure in base units, and their powers."""

    factor: Fraction
    dimensions: frozenset[Power]


NO_UNIT = Unit()


def _write_power(name: str, power: int) -> str:
    return name if power == 1 else f"{name}^{power}"


def _parse_dimensions(text: str) -> frozenset[Power]:
    powers = (name.partition("^") for name in text.split())
    return frozenset((name, int(power or 1)) for name, _, power in powers)


def _read_table() -> tuple[dict[str, str], dict[str, Measure]]:
    """Return the names by word, and the measures by name."""
    names, measures = dict[str, str](), dict[str, Measure]()
    for line in filter(None, _TABLE.split("\n")):
        kind, name, factor, *others = line.split()
        measures[name] = Measure(Fraction(factor), _parse_dimensions(_DIMENSIONS.get(kind, kind)))
        for word in (name, *others):
            names[word] = name
            if len(word) > 2 and word.isascii() and word.isalpha():
                names.setdefault(word + "s", name)
    return names, measures


_NAMES, _MEASURES = _read_table()


def parse_measure(word: str) -> str | None:
    """Return the canonical name of a unit word or symbol that is known without pint.

    Case matters for single letters and symbols with a prefix only.
    """
    name = _NAMES.get(word) or (word if SYMBOL.fullmatch(word) else None)
    return name or (_NAMES.get(word.lower().rstrip(".")) if len(word) > 1 else None)


def is_glued_measure(letters: str) -> bool:
    """Return True if letters right after a digit are a unit, and not a product of variables."""
    return (letters in _NAMES or letters.lower() in _NAMES) or _GLUED_SYMBOL.fullmatch(letters) is not None


def parse_currency(sign: str) -> Unit:
    """Return the unit of a currency's sign or code."""
    return Unit(((parse_measure(sign) or sign, 1),))


@lru_cache(maxsize=4096)
def read_unit(text: str) -> Unit:
    """Return the unit at the beginning of the text after a number, or the noun that it counts."""
    if _PREPOSITION.match(text):
        return NO_UNIT
    return _read_unit(text, parse_measure)


def _read_unit(text: str, find: Finder) -> Unit:
    words = [word for word in _TOKEN.findall(text) if word.lower() not in _SKIPPED]
    powers, at = _read_product(words, find)
    if powers:
        return _make_unit(powers)
    noun = []
    while at < len(words) and words[at][0].isalpha() and words[at].isascii():
        if words[at].lower() in _NO_NOUN or words[at].lower() in _PER:
            break
        noun.append(words[at].lower())
        at += 1
    below = _read_product(words[at + 1 :], find)[0][:1] if at < len(words) and words[at].lower() in _PER else []
    return Unit((), tuple(below), " ".join(noun))


def _make_unit(powers: list[Power]) -> Unit:
    total: Counter[str] = Counter()
    for name, power in powers:
        above, below = _SPEEDS.get(name, (name, ""))
        total[above] += power
        if below:
            total[below] -= power
    above_line = sorted((name, power) for name, power in total.items() if power > 0)
    return Unit(tuple(above_line), tuple(sorted((name, -power) for name, power in total.items() if power < 0)))


def _read_product(words: list[str], find: Finder) -> tuple[list[Power], int]:
    """Return the measures at the beginning with their powers, and the index after them.

    After a fraction line all that follows without a sign is below: J/kg K is J/(kg K).
    """
    powers: list[Power] = []
    at, sign = 0, 1
    while at < len(words):
        start, new_sign = at, sign
        if words[at].lower() in _PER or words[at] in ("*", "\\cdot"):
            new_sign = -1 if words[at].lower() in _PER else sign
            start += 1
            if not powers and new_sign > 0:
                break
        if start < len(words) and words[start] == "(":
            start += 1
        if powers and start == at and words[at].lower() in ("in", "am", "pm"):
            break
        found, power, after = _read_factor(words, start, find)
        if not found:
            break
        if new_sign < 0 and not powers:  # 18 per day
            return [], 0
        powers += [(name, new_sign * power) for name in found]
        at, sign = after, new_sign
        if at < len(words) and words[at] == ")":
            at, sign = at + 1, 1
    return powers, at


def _read_factor(words: list[str], at: int, find: Finder) -> tuple[list[str], int, int]:
    """Return one measure (several for newton-meters), its power, and the index after it."""
    power = 1
    if at + 1 < len(words) and words[at].lower() in _AREA and find(words[at + 1]):
        power = _AREA[words[at].lower()]
        at += 1
    if at >= len(words):
        return [], 1, at
    pair = find("_".join(words[at : at + 2]).lower()) if len(words) > at + 1 and words[at + 1].isalpha() else None
    parts = [pair] if pair else [find(words[at].replace(" ", ""))]
    if parts == [None]:
        parts = [find(part) for part in words[at].split("-")]
    names = [name for name in parts if name is not None]
    if len(names) < len(parts):
        return [], 1, at
    at += 2 if pair else 1
    following = find(words[at]) if at < len(words) else None
    if names == ["degree"] and following in ("°C", "°F"):
        names, at = [following], at + 1
    if at < len(words) and (words[at][0] == "^" or words[at].lower() in _POWER_WORDS):
        power = int(words[at].strip("^{ }")) if words[at][0] == "^" else _POWER_WORDS[words[at].lower()]
        at += 1
    return names, power, at


# Comparison


def are_same_amount(a: Fraction, unit: Unit, b: Fraction, other: Unit) -> bool:
    """Return True if two amounts are equal by the rules of this module."""
    if unit == other:
        return a == b
    if unit.noun or other.noun:
        if not _has_thing(unit) or not _has_thing(other) or _share_word(unit, other):
            unit, other = Unit((), unit.below), Unit((), other.below)
        else:
            unit, other = _resolve(unit), _resolve(other)
            if unit.noun or other.noun:
                return False
    if unit.above and other.above:
        ratio = _compute_ratio(unit, other)
        if ratio is not None:
            return _in_base(a, unit) == _in_base(b, other)
        if bool(unit.below) == bool(other.below):
            return False
    above = _compute_ratio(Unit(unit.above), Unit(other.above)) if unit.above and other.above else Fraction(1)
    below = _compute_ratio(Unit(unit.below), Unit(other.below)) if unit.below and other.below else Fraction(1)
    return above is not None and below is not None and a * above == b * below


def convert(unit: Unit, other: Unit) -> Fraction | None:
    """Return the factor from one unit to the other; ``None`` if they measure different quantities."""
    if not unit.above or not other.above or unit.below or other.below:
        return None
    return _compute_ratio(unit, other)


def count_details(unit: Unit) -> int:
    """Return how much a unit says: a part that is missing matches any."""
    return _has_thing(unit) + bool(unit.below)


def _has_thing(unit: Unit) -> bool:
    return bool(unit.above or unit.noun)


def _share_word(unit: Unit, other: Unit) -> bool:
    ours, theirs = (
        {word.removesuffix("s") for word in one.noun.split()} | {parse_measure(word) for word in one.noun.split()}
        if one.noun
        else {name for name, _ in one.above}
        for one in (unit, other)
    )
    return not (ours & theirs).isdisjoint(ours - {None})


def _compute_ratio(unit: Unit, other: Unit) -> Fraction | None:
    """Return the factor from one unit to the other; ``None`` for different quantities."""
    ours, theirs = _measure(unit), _measure(other)
    if ours is None or theirs is None or ours.dimensions != theirs.dimensions:
        return None
    return ours.factor / theirs.factor


def _in_base(value: Fraction, unit: Unit) -> Fraction:
    measure = _measure(unit)
    assert measure is not None
    name, power = unit.above[0]
    is_temperature = len(unit.above) == 1 and power == 1 and not unit.below
    return value * measure.factor + (_OFFSETS.get(name, 0) if is_temperature else 0)


@lru_cache(maxsize=1024)
def _measure(unit: Unit) -> Measure | None:
    """Return a unit's size and dimensions; ``None`` for a symbol that pint does not know either."""
    factor, dimensions = Fraction(1), Counter[str]()
    for line, sign in ((unit.above, 1), (unit.below, -1)):
        for name, power in line:
            measure = _MEASURES.get(name) or _look_up(name)
            if measure is None:
                return None
            factor *= measure.factor ** (sign * power)
            for base, count in measure.dimensions:
                dimensions[base] += sign * power * count
    return Measure(factor, frozenset((base, count) for base, count in dimensions.items() if count))


@lru_cache(maxsize=1024)
def _resolve(unit: Unit) -> Unit:
    """Return the unit with the measure that pint finds in its noun, if it finds one."""
    if not unit.noun:
        return unit
    found = _read_unit(unit.noun, lambda word: parse_measure(word) or (word if _look_up(word) else None))
    return unit if found.noun else Unit(found.above, (*found.below, *unit.below))


@cache
def _create_registry() -> Any:
    from pint import UnitRegistry  # half a second, which most services never need

    return UnitRegistry(non_int_type=Fraction)


@cache
def _look_up(word: str) -> Measure | None:
    """Return pint's measure of a symbol, or of a word that is spelled out: "cats" are no centi-atmospheres."""
    is_symbol = SYMBOL.fullmatch(word) is not None
    if not is_symbol:
        word = word.lower()
    for prefix, name, _ in _create_registry().parse_unit_name(word):
        if not (is_symbol or (word.startswith(prefix) and len(word) > 2)):
            continue
        try:
            size = _create_registry().Quantity(Fraction(1), prefix + name).to_base_units()
        except TypeError:  # a logarithmic unit has no factor
            continue
        dimensions = frozenset((str(base), int(power)) for base, power in size.unit_items() if power.denominator == 1)
        if dimensions and len(dimensions) == len(list(size.unit_items())):
            return Measure(Fraction(size.magnitude), dimensions)
    return None
