"""Dates, times and numbers in groups (telephone numbers, versions, addresses), which are no arithmetic.

Dates and times have one form: 2024-03-01, 2024-3-1 and March 1, 2024; 9:05 PM and 21:05. A date whose day could be its
month, such as 03/04/2024, equals itself alone. Other groups are compared digit by digit.
"""

from __future__ import annotations

import re
from datetime import date

_TIME = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?(?:\s?([ap])\.?\s?m\.?)?", re.IGNORECASE)
_DATE = re.compile(r"(\d{1,4})([-/.])(\d{1,2})\2(\d{1,4})")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_WEEKDAY = r"(?:on )?(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,? )?(?:the )?"
_WRITTEN_DATES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{_WEEKDAY}{_DAY}(?: of |[ -]){_MONTH}(?:(?:,? |-)(?P<year>\d{{4}}))?",
        rf"{_WEEKDAY}{_MONTH} (?:the )?{_DAY}(?:(?:, ?| )(?P<year>\d{{4}}))?",
        rf"(?P<year>\d{{4}})(?:,? |-){_MONTH}[ -]{_DAY}",
    )
)
_LEAP_YEAR = 2000
_MOMENT = re.compile(r"(\d{4}-\d\d?-\d\d?)[T ]\s?(\d{1,2}:\d\d(?::\d\d)?)(?:\.\d+)?(Z|[+-]\d\d:?\d\d)?")
_DOTTED = re.compile(r"[vV]?\d{1,9}(?:\.\d{1,9}){2,7}(?:[-+][A-Za-z][\w.]*)?|[vV]\d{1,9}\.\d{1,9}")
_RATIO = re.compile(r"\d{1,9}(?:\.\d{1,9})?(?:\s?:\s?\d{1,9}(?:\.\d{1,9})?){2,7}")
_PHONE = re.compile(
    r"\+\d{1,3}(?:[\s.-]\(?\d{1,5}\)?){2,5}"
    r"|(?:\+?\d{1,3}[\s.-]?)?\(\d{2,5}\)[\s.-]?\d{2,5}(?:[\s.-]\d{2,5}){1,3}"
)
_PHONE_DIGITS = 8
_GROUPS = re.compile(r"\d{1,9}(?:-\d{1,9}){1,5}(?:-[Xx])?|\d{1,4}(?:/\d{1,4}){2}")
_PATTERNS = ((3, 3, 4), (1, 3, 3, 4), (3, 2, 4), (4, 4, 4, 4), (3, 4, 4), (2, 4, 4))
"""Lengths of the groups of telephone, social security and card numbers."""
_BOOK = re.compile(r"(?:97[89]-)?\d{1,5}-\d{1,7}-\d{1,7}-[\dXx]")


def read_code(text: str) -> str | None:
    """Return the form of a date, time or grouped number; ``None`` for anything else."""
    if not 3 <= len(text) <= 64 or not any(char.isdigit() for char in text):
        return None
    if (moment := _MOMENT.fullmatch(text)) is not None:
        day, time = _read_date(moment.group(1)), _read_time(moment.group(2))
        return f"{day} {time}{moment.group(3) or ''}" if day and time else None
    found = _read_time(text) or _read_date(text) or read_written_date(text)
    if found is not None:
        return found
    if _DOTTED.fullmatch(text):
        return text.lower().removeprefix("v" if text.count(".") > 1 else "")
    if _RATIO.fullmatch(text):
        return re.sub(r"\s", "", text)
    if _PHONE.fullmatch(text) and sum(map(str.isdigit, text)) >= _PHONE_DIGITS:
        return ("+" if text[0] == "+" else "") + "-".join(re.findall(r"\d+", text))
    return text.upper() if _GROUPS.fullmatch(text) and _is_grouped(text) else None


def _read_time(text: str) -> str | None:
    """Return a time of day by the clock of 24 hours."""
    time = _TIME.fullmatch(text)
    if time is None or not (int(time[1]) < 100 and int(time[2]) < 60 and int(time[3] or 0) < 60):
        return None
    hours = int(time[1])
    if time[4]:
        if not 1 <= hours <= 12:
            return None
        hours = hours % 12 + (12 if time[4].lower() == "p" else 0)
    seconds = f":{time[3]}" if time[3] and time[3] != "00" else ""
    return f"{hours:02}:{time[2]}{seconds}"


def _read_date(text: str) -> str | None:
    """Return a date without zeros, year first where the order is clear, else in its order; ``None`` for no date."""
    found = _DATE.fullmatch(text)
    if found is None:
        return None
    first, sign, second, third = found.groups()
    if len(first) == 4 and len(third) <= 2:
        orders = [(first, second, third)]
    elif len(first) <= 2 and len(third) == 4:
        orders = [(third, second, first), (third, first, second)]
    else:
        return None
    if not any(_is_date(*map(int, order)) for order in orders):
        return None
    possible = {tuple(map(int, order)) for order in orders if _is_date(*map(int, order))}
    if len(possible) == 1 and (sign != "." or len(third) == 4):  # 2024.3.1 may be a version
        sign, (first, second, third) = "-", map(str, possible.pop())
    return sign.join(str(int(part)) for part in (first, second, third))


def read_written_date(text: str) -> str | None:
    """Return the form of a date with the name of its month, such as "March 1st, 2024"; ``None`` for anything else.

    One without a year has a short name: mar 1.
    """
    spaced = re.sub(r"\s+", " ", text)
    found = next((match for pattern in _WRITTEN_DATES if (match := pattern.fullmatch(spaced))), None)
    if found is None:
        return None
    month, day = _MONTHS.index(found["month"][:3].lower()) + 1, int(found["day"])
    if not _is_date(int(found["year"] or _LEAP_YEAR), month, day):
        return None
    return f"{found['year']}-{month}-{day}" if found["year"] else f"{_MONTHS[month - 1]} {day}"


def _is_date(year: int, month: int, day: int) -> bool:
    try:
        date(year, month, day)
    except ValueError:
        return False
    return year >= 1000


def _is_grouped(text: str) -> bool:
    """Return True if groups of digits between hyphens are no subtraction."""
    groups = re.split("[-/]", text)
    if any(len(group) > 1 and group[0] == "0" for group in groups):
        return True
    lengths = tuple(map(len, groups))
    return lengths in _PATTERNS or (_BOOK.fullmatch(text) is not None and sum(lengths) in (10, 13))
