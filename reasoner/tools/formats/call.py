"""Function tools, calls of them, and equality of calls.

The arguments of a call stay the JSON text that the model wrote. They are normalized only to compare calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

MAX_DEPTH = 100
"""Maximum nesting of arguments."""
MAX_QUOTED = 60
"""Maximum number of characters of an answer that an error message quotes."""

PYTHON, CODE = "python", "code"
"""Name of the function by which a model runs Python, and of its argument."""

Vote = Literal["name", "arguments", "exact"]
"""Parts of a call that must be equal in equal answers."""


class MalformedCall(ValueError):
    """A call that cannot be run as it is written. The message says what is wrong, and what would be right."""


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments, which are an object."""
    strict: bool = False
    """True if the arguments must be valid under the schema."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a function."""

    name: str
    arguments: str
    """The JSON text of an object."""


@dataclass(frozen=True, slots=True)
class _Number:
    """A number by its value: the digits without zeros at either end, times a power of ten."""

    is_negative: bool
    digits: str
    exponent: int

    def __str__(self) -> str:
        sign = "-" if self.is_negative else ""
        return f"{sign}{self.digits}e{self.exponent}" if self.exponent else f"{sign}{self.digits}"


def check_arguments(arguments: str) -> None:
    """Raise ``MalformedCall`` if a text is not a JSON object that every client can read, or gives an argument twice."""
    if not isinstance(parse_json(arguments), dict):
        raise MalformedCall(f"the arguments must be a JSON object, not {excerpt(arguments)}")
    try:
        json.dumps(json.loads(arguments), allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:  # 1e999, half of a surrogate pair, a number of thousands of digits
        raise MalformedCall(f"the arguments have a value that clients cannot read: {error}") from None


def canonicalize_arguments(arguments: str) -> str:
    """Return a text that is the same for equal arguments: keys sorted, and numbers by value (1 is 1.0 and 10e-1).

    Raises ``MalformedCall`` if the arguments are not JSON.
    """
    try:
        return _write(parse_json(arguments))
    except RecursionError:
        raise MalformedCall(f"the arguments are nested more than {MAX_DEPTH} deep") from None


def vote_key(calls: Iterable[ToolCall], vote: Vote) -> str:
    """Return a text that is the same for equal answers.

    ``name``: the names of the functions. ``arguments``: their names and equal arguments. For both, parallel calls may
    come in any order. ``exact``: the same texts in the same order.
    """
    match vote:
        case "name":
            return json.dumps(sorted(call.name for call in calls))
        case "arguments":
            return json.dumps(sorted((call.name, canonicalize_arguments(call.arguments)) for call in calls))
        case "exact":
            return json.dumps([(call.name, call.arguments) for call in calls])


def excerpt(text: str, start: int = 0) -> str:
    """Return the beginning of a text from ``start``, quoted for an error message."""
    if start >= len(text):
        return "the end of the text"
    return repr(text[start : start + MAX_QUOTED]) + ("…" if len(text) > start + MAX_QUOTED else "")


def parse_json(arguments: str) -> Any:
    """Return the value of a JSON text, with numbers in a form of which equal ones are equal.

    Raises ``MalformedCall`` also for constants that JSON lacks, and for objects with two members of one name.
    """
    try:
        return json.loads(
            arguments,
            parse_int=_parse_number,
            parse_float=_parse_number,
            parse_constant=_refuse_constant,
            object_pairs_hook=make_object,
        )
    except MalformedCall:
        raise
    except RecursionError:
        raise MalformedCall(f"the arguments are nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise MalformedCall(f"the arguments are not JSON: {error}") from None


def make_object(members: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object, and refuse two members of one name: readers differ in which of them counts."""
    made = dict(members)
    if len(made) < len(members):
        names = [name for name, _ in members]
        twice = next(name for name in names if names.count(name) > 1)
        raise MalformedCall(f"the arguments give {twice!r} twice")
    return made


def _parse_number(text: str) -> _Number:
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, fraction = mantissa.removeprefix("-").partition(".")
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return _Number(False, "0", 0)
    stripped = digits.rstrip("0")
    power = int(exponent or 0) - len(fraction) + len(digits) - len(stripped)
    return _Number(mantissa.startswith("-"), stripped, power)


def _refuse_constant(text: str) -> NoReturn:
    raise MalformedCall(f"the arguments are not JSON, which has no {text}")


def _write(value: Any) -> str:
    match value:
        case _Number():
            return str(value)
        case dict():
            return "{" + ",".join(f"{json.dumps(key)}:{_write(value[key])}" for key in sorted(value)) + "}"
        case list():
            return "[" + ",".join(map(_write, value)) + "]"
        case _:
            return json.dumps(value)
