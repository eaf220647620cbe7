"""Names of the request's fields in errors about the job that was made of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from api.http.problems import Problem
from reasoner.admission.refusal import JobRefused
from reasoner.jobs.messages import Message

_BEGINS_WITH_FIELD = re.compile(r"([a-z_]+(?:\.\w+)*): (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the job, and the field of the request from which it comes."""

    field: str
    message: Message


def refuse_field(field: str, message: str) -> Problem:
    """Return the problem of a request with a wrong field."""
    return Problem(422, "invalid-request", f"{field}: {message}", errors=[(field, message)])


@contextmanager
def naming_field(field: str) -> Iterator[None]:
    """Turn errors of a model that is made of a request's field into errors of the request."""
    try:
        yield
    except ValidationError as error:
        raise RequestValidationError([_locate(part, field) for part in error.errors()]) from None


@contextmanager
def naming_sent_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the fields that were sent. ``names``: fields of the request by fields of the job."""
    try:
        yield
    except ValidationError as error:
        parts = [_locate(part, "") for part in error.errors()]
        raise RequestValidationError([part | {"loc": _rename_location(part["loc"], names)} for part in parts]) from None
    except JobRefused as refusal:
        field, message = _rename(refusal.field, refusal.message, names)
        raise JobRefused(refusal.code, field, message) from None
    except Problem as problem:
        if not problem.errors:
            raise
        errors = [_rename(error.field, error.message, names) for error in problem.errors]
        detail = "; ".join(f"{field}: {message}" for field, message in errors)
        named = [(field or "body", message) for field, message in errors]
        raise Problem(problem.status_code, problem.code, detail, errors=named, headers=problem.headers) from None


def _locate(part: Any, field: str) -> dict[str, Any]:
    """Return a validation error with its place in the body. The check of a whole model begins with a field's name."""
    location: tuple[str | int, ...] = part["loc"]
    message: str = part["msg"].removeprefix("Value error, ")
    named = _BEGINS_WITH_FIELD.fullmatch(message)
    if not location and named is not None:
        location, message = tuple(named[1].split(".")), named[2]
    return {**part, "loc": ("body", *field.split(".") * bool(field), *location), "msg": message}


def _rename_location(location: tuple[str | int, ...], names: Mapping[str, str]) -> tuple[str | int, ...]:
    return ("body", *rename_field(".".join(map(str, location[1:])), names).split("."))


def _rename(field: str | None, message: str, names: Mapping[str, str]) -> tuple[str | None, str]:
    """Return a job's wrong field and the message as the request has them. The message may name a part of the field."""
    named = _BEGINS_WITH_FIELD.fullmatch(message)
    if named is not None and field is not None and named[1].startswith(field):
        field, message = named[1], named[2]
    return None if field is None else rename_field(field, names), message


def rename_field(field: str, names: Mapping[str, str]) -> str:
    """Return the field of the request for a field of the job: the longest beginning with another name has that."""
    parts = field.split(".")
    for end in range(len(parts), 0, -1):
        if (name := names.get(".".join(parts[:end]))) is not None:
            return ".".join([name, *parts[end:]])
    return field
