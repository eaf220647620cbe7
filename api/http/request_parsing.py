"""Strict parsing of requests: JSON bodies, query parameters and the ``Idempotency-Key`` header."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Annotated, Any, NoReturn

import jiter
from fastapi import Header, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from api.http.operations import list_object_parameters, list_query_parameters, list_repeatable_parameters
from api.http.problems import Problem

MAX_DEPTH = 100
"""Nesting of arrays and objects: far beyond what any field needs, far below what overflows a parser."""

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        description="Requests with the same key and body make one job, or one batch, within a day.",
    ),
]


class JsonRoute(APIRoute):
    """A route whose body is parsed by ``parse_json``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_strictly


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parse_json(await self.body())


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON document (RFC 8259) in UTF-8.

    Raises ``Problem`` for malformed JSON and for what two parsers could read differently: names given twice, halves of
    surrogate pairs, numbers beyond a 64-bit float, and nesting deeper than ``MAX_DEPTH``.
    """
    try:
        value = jiter.from_json(
            body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="keys"
        )
    except ValueError as error:
        _refuse_json(str(error))
    _check_depth_and_numbers(value)
    return value


def _check_depth_and_numbers(document: Any) -> None:
    level = [document]
    for _ in range(MAX_DEPTH + 1):
        if any(isinstance(value, float) and math.isinf(value) for value in level):
            _refuse_json("a number is larger than a 64-bit float can hold")
        level = [inner for value in level for inner in _list_members(value)]
        if not level:
            return
    _refuse_json(f"arrays and objects are nested more than {MAX_DEPTH} deep")


def _list_members(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _refuse_json(reason: str) -> NoReturn:
    raise Problem(400, "malformed-json", f"the body is not a valid JSON document: {reason}")


async def check_query_parameters(request: Request) -> None:
    """Raise ``Problem`` for query parameters that the route does not have, and for those that are given twice."""
    num_values = Counter(name for name, _ in request.query_params.multi_items())
    if not num_values:
        return
    objects, repeatable = list_object_parameters(request), list_repeatable_parameters(request)
    names = [f"{name}[KEY]" if name in objects else name for name in list_query_parameters(request)]
    hint = f"known parameters: {', '.join(names)}" if names else "this call has none"
    members = {name for name in num_values if name.endswith("]") and name.partition("[")[0] in objects}
    known = members.union(names)
    errors = [(name, f"unknown parameter; {hint}") for name in num_values if name not in known]
    errors += [
        (name, "give it once") for name in num_values if name in known.difference(repeatable) and num_values[name] > 1
    ]
    if errors:
        detail = "; ".join(f"{name}: {message}" for name, message in errors)
        raise Problem(422, "invalid-request", detail, errors=errors)


async def read_idempotency(key: str | None, request: Request) -> tuple[str, str] | None:
    """Return the idempotency key with a digest of the body, which ignores how the JSON is written."""
    if key is None:
        return None
    canonical = json.dumps(json.loads(await request.body()), sort_keys=True, separators=(",", ":"))
    return key, hashlib.sha256(canonical.encode()).hexdigest()
