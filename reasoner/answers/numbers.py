"""Parsing of numbers in the forms that models write: thousands separators, currency, units, percent, names, words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from reasoner.answers.notation.number_words import replace_words
from reasoner.answers.notation.units import (
    CURRENCIES,
    NO_UNIT,
    Unit,
    are_same_amount,
    convert,
    is_glued_measure,
    parse_currency,
    parse_measure,
    read_unit,
)

MAX_EXPONENT = 400
"""Largest power of ten that is expanded."""
ROUNDED_DIGITS = 6
"""Number of decimals from which a decimal number may be a rounded or truncated fraction."""

_DIGITS = (
    r"(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d{2})+,\d{3}|[1-9]\d{0,2}(?: \d{3})*(?: 0\d\d)(?: \d{3})*"
    r"|[1-9]\d?(?: \d{3}){2,}|\d+)(?![\d])"
)
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+|\.(?!\d))?|\.\d+)"
_POWER = r"10\s?\^\s?(?:\{\s?(?P<power>[+-]?\d{1,4})\s?\}|(?P<bare_power>[+-]?\d{1,4}))"
_CORE = re.compile(
    rf"(?P<repeating>\d*\.\d*)(?:\\(?:overline|bar|dot)\{{(?P<period>\d+)\}}|\((?P<paren>\d+)\))"
    rf"|(?:(?P<whole>\d+)(?:\s|\s?(?=\\)))?"
    rf"(?:\\frac\{{\s?(?P<top>[+-]?\d+(?:\.\d+)?)\s?\}}\{{\s?(?P<bottom>\d+(?:\.\d+)?)\s?\}}"
    rf"|(?P<over>\d+)\s?/\s?(?P<under>\d+))(?![\d.^_!/])"
    rf"|(?:(?P<mantissa>{_DECIMAL})\s?(?:\\times|\\cdot|\*|x)\s?)?{_POWER}(?![\d.^!])"
    rf"|(?P<number>{_DECIMAL})(?:[eE](?P<exponent>[+-]?\d{{1,4}})(?!\d))?(?![\d^_!]|\.\d|/(?!\s?[A-Za-z]{{2}}))"
)
_NAME = re.compile(
    r"([A-Za-z](?:_(?:\{\w{1,9}\}|\w))?|[A-Z]{2}|[A-Za-z]\([A-Za-z]\)|\([A-Za-z](?:\s?,\s?[A-Za-z])+\))"
    r"\s?(?:=|:=|\\approx)\s?(?!=)"
)
_LONG_NAME = re.compile(r"(?:the )?[A-Za-z]{4,20}(?: [A-Za-z]{1,20}){0,3}\s?(?:=|:|\\approx)\s?", re.IGNORECASE)
_MONEY = re.compile(rf"(?:US|CA|AU)?\s?([{CURRENCIES}])\s?|(USD|EUR|GBP|INR|Rs\.?)\s", re.IGNORECASE)
_MONEY_BEHIND = re.compile(rf"\s?([{CURRENCIES}])")
_EUROPEAN = re.compile(r"(\d{1,3}(?:\.\d{3})+|\d{1,9}),(\d{2})(?![\d,])")
_PERCENT = re.compile(r"\s?%|\s(?:percent(?:age(?: points?)?)?|per cent|pct)\b\.?", re.IGNORECASE)
_GLUED = re.compile(r"/?\s?([A-Za-zµΩ¢°]+)")
_LARGE = {
    "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "k": 3, "K": 3, "M": 6, "B": 9, "bn": 9,
    "mn": 6, "m": 6, "lakh": 5, "lakhs": 5, "crore": 7, "crores": 7,
}  # fmt: skip
_LARGE_WORD = re.compile(r"\s?(hundred|thousand|million|billion|trillion|lakhs?|crores?)\b", re.IGNORECASE)
_DOZENS = re.compile(r"\s?dozens?\b", re.IGNORECASE)
_LARGE_LETTER = re.compile(r"(k|K|M|B|bn|mn|m)\b")
_COUNTED = re.compile(
    r"(?:[\s,/]++|\s?\^\{?\s?-?\d\s?\}?|\\cdot\s?|\*|[A-Za-zµΩ¢°]++(?:['.-][A-Za-z]++)*+\.?"
    r"|[(\[][A-Za-z](?:[A-Za-z ,.'*-]|\\cdot\s?|\^\{?-?\d\}?)*+[)\]])*+"
)
_MEASURED = re.compile(
    r"(.*(?:[\d})]|\\pi)) ((?:(?:square|sq|cubic|cu)\.? )?[A-Za-zµΩ°](?:[A-Za-zµΩ°/^0-9 .{}-]|\\cdot ?){0,60})"
)
"""Pattern of a formula followed by its unit or a counted noun."""
_STEP = (
    rf"(?:[\s+\-*/.()%^{{}}!{CURRENCIES}]|(?<=\d),(?=\d{{3}})|(?<=[\d\s])x(?=\s?\d)"
    r"|\\(?:times|cdot|div|frac)(?![A-Za-z]))"
)
_CALCULATES = re.compile(rf"{_STEP}*+\d(?:\d|{_STEP})*+")
_CHINESE = re.compile(r"\s?[\u4e00-\u9fff]{1,8}")
_PARTS = re.compile(r"(?<=[A-Za-z.])\s?(?:,\s?)?(?:and\s)?(?=\d|\\frac)")
WORD = re.compile(r"[A-Za-z]+(?:['.-][A-Za-z]+)*")
_CHANGES = frozenset(
    ("and", "or", "plus", "minus", "out", "over", "half", "halves", "third", "thirds", "quarter", "quarters", "tenths",
     "hundredths", "thousandths", "mod", "modulo", "choose", "factorial", "remainder", "divided", "multiplied", "base",
     "pi", "sin", "cos", "tan", "log", "ln", "exp", "sqrt", "not", "if", "when", "unless", "where")
)  # fmt: skip
"""Words that change the number before them or make it a condition."""
_SHORT = frozenset(
    ["st", "nd", "rd", "th", "sq", "cu", "of", "in", "at", "on", "by", "us", "a", "an", "is", "it", "as", "we", "he"]
)
_BASED = re.compile(r"\(?(\d[0-9A-Z]{0,63})\)?_\s?\{?(\d{1,2})\}?")


@dataclass(frozen=True, slots=True)
class Number:
    """A number with its unit. ``base`` is the stated base of its digits if it is not ten; ``value`` accounts for it."""

    value: Fraction
    unit: Unit = NO_UNIT
    percent: bool = False
    name: str = ""
    base: str = ""
    last_place: Fraction | None = None
    """The value of the last decimal place, if there are so many that the number may be rounded."""

    def __str__(self) -> str:
        if self.base:
            return self.base
        unit = str(self.unit)
        name = f"{self.name}=" if self.name else ""
        value = str(self.value) if self.last_place is None else write_decimal(self.value, self.last_place)
        return f"{name}{value}{'%' if self.percent else ''}{' ' * bool(unit)}{unit}"


def read_number(text: str, *, alone: bool = True) -> Number | None:
    """Parse a normalized text as a number with its unit. ``alone``: it is not an element of a list."""
    based = _BASED.fullmatch(text)
    if based is not None:
        return _in_base(*based.groups())
    name, text = split_name(text)
    sign, text = _split_sign(replace_words(_strip_brackets(text)))
    money = _MONEY.match(text)
    unit = NO_UNIT
    if money is not None:
        unit = parse_currency(money.group(1) or money.group(2).lower().rstrip("."))
        more, text = _split_sign(text[money.end() :])
        sign *= more
        text = _EUROPEAN.sub(lambda match: f"{match.group(1).replace('.', '')}.{match.group(2)}", text, count=1)
    found = _CORE.match(text)
    if found is None or (not alone and "," in found.group()):
        return None
    value = _compute_value(found)
    if value is None:
        return None
    tail = _read_tail(text[found.end() :], value, unit)
    if tail is None:
        return None
    last_place = _last_place(found)
    if last_place is not None and value:
        last_place *= tail[0] / value
    return Number(sign * tail[0], tail[1], tail[2], name, last_place=last_place)


def _in_base(digits: str, base: str) -> Number | None:
    if not 2 <= int(base) <= 36:
        return None
    try:
        return Number(Fraction(int(digits, int(base))), base=f"{digits}_{base}")
    except ValueError:
        return None


def split_name(text: str) -> tuple[str, str]:
    """Split "x = 5" into the name (empty if there is none) and the rest. Words, as in "Total = 5", are no name."""
    name = _NAME.match(text)
    if name is not None and "=" not in text[name.end() :]:
        return re.sub(r"[{}\s]", "", name.group(1)), text[name.end() :]
    name = _LONG_NAME.match(text)
    if name is not None and "=" not in text[name.end() :]:
        return "", text[name.end() :]
    return "", text


def _strip_brackets(text: str) -> str:
    """Remove brackets around the whole text."""
    text = text.strip()
    for opening, closing in (("(", ")"), ("{", "}"), ("[", "]")):
        inner = text[1:-1]
        if text == f"{opening}{inner}{closing}" and not set(inner) & set("(){}[],"):
            return inner.strip()
    return text


def _split_sign(text: str) -> tuple[int, str]:
    if text[:1] in ("+", "-"):
        return (-1 if text[0] == "-" else 1), text[1:].lstrip()
    return 1, text


def _compute_value(found: re.Match[str]) -> Fraction | None:
    """Return the value of a match of ``_CORE``."""
    part = found.groupdict()
    period = part["period"] or part["paren"]
    if period:
        start, digits = Fraction(f"{part['repeating']}0"), len(part["repeating"].partition(".")[2])
        return start + Fraction(int(period), (10 ** len(period) - 1) * 10**digits)
    top, bottom = part["top"] or part["over"], part["bottom"] or part["under"]
    if top is not None:
        if not Fraction(bottom):
            return None
        value = Fraction(top) / Fraction(bottom)
        if part["whole"] is None:
            return value
        return int(part["whole"]) + value if 0 < value < 1 else None
    exponent = int(part["exponent"] or part["power"] or part["bare_power"] or 0)
    digits_text = (part["number"] or part["mantissa"] or "1").replace(",", "").replace(" ", "").rstrip(".")
    if abs(exponent) > MAX_EXPONENT:
        return None
    return Fraction(digits_text) * Fraction(10) ** exponent


def _last_place(found: re.Match[str]) -> Fraction | None:
    """Return the value of the last place of a decimal with ``ROUNDED_DIGITS`` decimals or more; ``None`` for others."""
    part = found.groupdict()
    digits = (part["number"] or part["mantissa"] or "").partition(".")
    significant = len((digits[0].replace(",", "").replace(" ", "") + digits[2]).lstrip("0"))
    if min(len(digits[2]), significant + 1) < ROUNDED_DIGITS:
        return None
    exponent = int(part["exponent"] or part["power"] or part["bare_power"] or 0)
    return Fraction(10) ** (exponent - len(digits[2]))


def write_decimal(value: Fraction, last_place: Fraction) -> str:
    """Return a number with the places that it was written with, so that reading it gives the same."""
    exponent = 0
    while last_place * 10**ROUNDED_DIGITS > 1:
        value, last_place, exponent = value / 10, last_place / 10, exponent + 1
    places = count_decimals(last_place, MAX_EXPONENT + 1000)
    if places is None or last_place.numerator != 1:
        return str(value * Fraction(10) ** exponent)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}{f'e{exponent}' if exponent else ''}"


def _read_tail(tail: str, value: Fraction, unit: Unit) -> tuple[Fraction, Unit, bool] | None:
    """Return (value, unit, is a percentage) by the text after the digits; ``None`` if it is no number."""
    large = _LARGE_WORD.match(tail) or (_LARGE_LETTER.match(tail) if unit.above else None)
    if large is not None:
        word = large.group(1)
        value, tail = value * 10 ** _LARGE.get(word, _LARGE.get(word.lower(), 0)), tail[large.end() :]
    elif (dozens := _DOZENS.match(tail)) is not None:
        value, tail = value * 12, tail[dozens.end() :]
    percent = _PERCENT.match(tail)
    if percent is not None:
        tail = tail[percent.end() :]
    else:
        behind = _MONEY_BEHIND.match(tail)
        if behind is not None and not unit.above:
            unit, tail = parse_currency(behind.group(1)), tail[behind.end() :]
    if tail:
        if not _is_counted(tail):
            return None
        following = read_unit(tail)
        unit = Unit(unit.above, following.below) if unit.above else following
    return value, NO_UNIT if percent is not None else unit, percent is not None


def _is_counted(tail: str) -> bool:
    """Return True if the text after a number only names what it counts or measures."""
    if _CHINESE.fullmatch(tail):
        return True
    if len(tail) > 200 or not _COUNTED.fullmatch(tail):
        return False
    words = [word.lower() for word in WORD.findall(tail)]
    if not words:
        return not tail.strip(" °¢")
    if not _CHANGES.isdisjoint(words) or words[0] in ("squared", "cubed") or "times" in words[:-1]:
        return False
    if not tail[0].isspace():  # 3cm is a length, 3m a product
        glued = _GLUED.match(tail)
        if glued is None:
            return tail[0] in "°¢"
        letters = glued.group(1)
        if letters in ("st", "nd", "rd", "th") or (is_glued_measure(letters) and (len(letters) > 1 or tail[0] == "/")):
            return True
        following = re.match(r"\s?\^|\s[A-Za-z]{1,2}\s?\^\{?-", tail[len(letters) :])  # 5m s^{-1}
        return following is not None and parse_measure(letters) is not None and "^{-" in tail
    first = WORD.findall(tail)[0]
    return parse_measure(first) is not None or len(first) >= 3 or first.lower() in _SHORT or tail.strip()[0] in "([°"


def split_unit(text: str) -> tuple[str, Unit]:
    """Return a formula without its unit or counted noun, and the unit."""
    found = _MEASURED.fullmatch(text)
    if (
        found is None
        or not _is_counted(f" {found.group(2)}")
        or (len(found.group(2)) == 1 and text[found.end(1) - 1].isalpha())
    ):
        return text, NO_UNIT
    return found.group(1), read_unit(found.group(2))


def take_result(text: str) -> str:
    """Return the result of a calculation (16 - 7 = 9), with its leading name if there is one."""
    if "=" not in text or len(sides := text.split("=")) > 10:
        return text
    if len(sides) == 2 and re.fullmatch(r"[A-Za-z]", sides[1].strip()) and _CALCULATES.fullmatch(sides[0]):
        sides.reverse()  # 18 = x
    named = bool(_NAME.fullmatch(sides[0].strip() + "="))
    if not all(_CALCULATES.fullmatch(side) for side in sides[named:-1]):
        return text
    calculated = len(sides) == 2 and _CALCULATES.fullmatch(sides[1]) and not read_number(sides[1].strip())
    if calculated and read_number(sides[0].strip()):
        return sides[0].strip()  # 18 = 9 * 2
    return f"{sides[0].strip()}={sides[-1]}" if named else sides[-1].strip()


def read_compound(text: str) -> Number | None:
    """Parse a compound measure as its sum: 5 feet 3 inches, 2 hours and 30 minutes."""
    parts = _PARTS.split(text)
    numbers = [read_number(part) for part in parts]
    if not 2 <= len(parts) <= 4 or any(number is None or not number.unit.above or number.name for number in numbers):
        return None
    first, *others = (number for number in numbers if number is not None)
    total = first.value
    for other in others:
        ratio = convert(other.unit, first.unit)
        if ratio is None or ratio >= 1 or other.value < 0:
            return None
        total += other.value * ratio
    return Number(total, first.unit)


def have_same_name(a: str, b: str) -> bool:
    """Return True if two names are equal or one is missing."""
    return not a or not b or a == b


def are_same_number(a: Number, b: Number) -> bool:
    """Return True if two numbers are equal, ignoring their names."""
    if a.base or b.base:
        return a.value == b.value if a.base and b.base else _format_digits(a) == _format_digits(b)
    if a.percent != b.percent and NO_UNIT in (a.unit, b.unit):
        part, whole = (a.value, b.value) if a.percent else (b.value, a.value)
        return whole in (part, part / 100)
    return are_same_amount(a.value, a.unit, b.value, b.unit) or (a.unit == b.unit and _is_rounded(a, b))


def _format_digits(number: Number) -> str:
    return number.base.partition("_")[0] or str(number.value)


def _is_rounded(a: Number, b: Number) -> bool:
    """Return True if one is a long decimal and the other the periodic fraction of which it is rounded or truncated."""
    if (a.last_place is None) == (b.last_place is None):
        return False
    decimal, exact = (a, b) if a.last_place is not None else (b, a)
    assert decimal.last_place is not None
    return count_decimals(exact.value) is None and abs(a.value - b.value) < decimal.last_place


@lru_cache(maxsize=1024)
def count_decimals(value: Fraction, limit: int = 50) -> int | None:
    """Return the number of decimals; ``None`` for more than the limit."""
    return next((count for count in range(limit) if not 10**count % value.denominator), None)
