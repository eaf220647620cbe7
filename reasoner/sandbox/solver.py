"""The solver process: runs the answer's code once, then serves the tester's requests for the names it defined."""

from __future__ import annotations

import types
from itertools import islice
from typing import Any

from reasoner.sandbox.wire import Closed, Pipe, decode, encode

MAX_ITEMS = 100_000
"""Maximum number of items of an iterator that the tester reads."""


def solve(code: str, pipe: Pipe) -> None:
    """Serve requests until the tester has ended. The first message reports if the code ran without an error."""
    module = types.ModuleType("solution")
    objects: list[Any] = []

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    try:
        exec(compile(code, "<answer>", "exec", dont_inherit=True, optimize=0), module.__dict__)
        pipe.send({"ready": True})
    except BaseException as error:
        pipe.send(_describe_failure(error))
        return
    while True:
        try:
            request = pipe.receive()
        except Closed:
            return
        try:
            answer = _execute_request(module, request, objects)
            reply = {"value": encode(answer, refer)}
        except BaseException as error:
            reply = _describe_failure(error)
        try:
            pipe.send(reply)
        except (ValueError, TypeError) as error:
            pipe.send(_describe_failure(error))


def _execute_request(module: types.ModuleType, request: dict[str, Any], objects: list[Any]) -> Any:
    if request["do"] == "global":
        return module.__dict__[request["name"]]
    this = objects[request["of"]]
    args = [decode(item, objects.__getitem__) for item in request.get("args", ())]
    match request["do"]:
        case "call":
            named = {name: decode(item, objects.__getitem__) for name, item in request["named"].items()}
            return this(*args, **named)
        case "get":
            return getattr(this, request["name"])
        case "len":
            return len(this)
        case "item":
            return this[args[0]]
        case "contains":
            return args[0] in this
        case "list":
            return list(islice(this, MAX_ITEMS))
    raise ValueError(request["do"])


def _describe_failure(error: BaseException) -> dict[str, Any]:
    """Return the class names of the error in method resolution order, and its text."""
    try:
        text = str(error)[:1000]
    except BaseException as worse:
        text = type(worse).__name__
    return {"error": [kind.__name__ for kind in type(error).__mro__], "text": text}
