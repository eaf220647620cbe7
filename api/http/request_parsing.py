"""Bodies of requests: JSON as RFC 8259 has it, and nothing that two readers could understand differently."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from api.http.problems import Problem

MAX_DEPTH = 100
"""Of arrays and objects inside each other: far beyond what any field asks for, far below what ends a reader."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonRoute(APIRoute):
    """A route whose body is read by ``parse``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return handled


class _Request(Request):
    async def json(self) -> Any:
        return parse(await self.body())


def parse(body: bytes) -> Any:
    """What a body says. Raises ``Problem`` for what is not JSON, for a name that is given twice, for numbers that no
    double holds, and for halves of surrogate pairs, which no UTF-8 can answer."""
    try:
        text = body.decode("utf-8-sig")
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except UnicodeDecodeError as error:
        _refuse(f"byte {error.start} is not UTF-8")
    except json.JSONDecodeError as error:
        _refuse(f"{error.msg} at character {error.pos}")
    except RecursionError:
        _refuse_depth()
    except ValueError:  # Python reads no more digits than that
        _refuse("a number has thousands of digits")
    _check_depth(found)
    if _SURROGATE.search(text):
        _check_characters(found)
    return found


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        names = [name for name, _ in members]
        twice = next(name for name in names if names.count(name) > 1)
        _refuse(f"{twice[:100]!r} is given twice in one object, and only one can hold")
    return found


def _constant(name: str) -> NoReturn:
    _refuse(f"{name} is no number in JSON")


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        _refuse(f"{digits[:100]} is more than a number can be")
    return value


def _check_depth(found: Any) -> None:
    level = [found]
    for _ in range(MAX_DEPTH + 1):
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        if not inner:
            return
        level = [part for parts in inner for part in parts]
    _refuse_depth()


def _check_characters(found: Any) -> None:
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        _refuse(f"\\u{ord(error.object[error.start]):04x} is half of a surrogate pair: write both halves, or UTF-8")


def _refuse_depth() -> NoReturn:
    _refuse(f"arrays and objects are more than {MAX_DEPTH} deep")


def _refuse(reason: str) -> NoReturn:
    raise Problem(400, "malformed-json", f"the body is not JSON that can be taken: {reason}")
