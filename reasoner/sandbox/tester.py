"""The tester process: runs the client's tests, with proxies of the solver's objects for names from the answer."""

from __future__ import annotations

import builtins
import inspect
import json
import os
import symtable
from typing import Any

from reasoner.sandbox.wire import Closed, Pipe, decode, encode


class AnswerFailed(Exception):
    """The answer's code raised an exception that is not built in, or could not be run."""


def test(tests: list[str], pipe: Pipe, results: int) -> None:
    """Run the tests in order; write a line to ``results`` at the start and for each result."""
    _write_result(results, {"begun": True})
    try:
        broken = _read_error(pipe.receive())
    except Exception:  # the solver ended, or a malicious answer sent something else
        broken = AnswerFailed("the answer's process ended")
    for source in tests:
        reason = str(broken) if broken else _run_test(source, pipe)
        _write_result(results, {"passed": reason is None, "reason": reason})


def _write_result(results: int, document: dict[str, Any]) -> None:
    line = json.dumps(document).encode() + b"\n"
    while line:
        line = line[os.write(results, line) :]


def foreign_names(source: str) -> list[str]:
    """Return the global names that a test uses, except built-in ones and those that it binds itself."""
    module = symtable.symtable(source, "<test>", "exec")
    bound = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used: set[str] = set()
    tables = [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table is module
        used |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
    return sorted(name for name in used - bound if not hasattr(builtins, name) and not name.startswith("__"))


def _run_test(source: str, pipe: Pipe) -> str | None:
    """Run one test and return why it failed, or ``None`` if it passed."""
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        for name in foreign_names(source):
            try:
                names[name] = _exchange(pipe, {"do": "global", "name": name})
            except KeyError:
                continue  # the test raises NameError when it uses the name
        exec(compile(source, "<test>", "exec", dont_inherit=True, optimize=0), names)
        for name, value in list(names.items()):
            if name.startswith("test") and inspect.isfunction(value):
                value()
    except BaseException as error:  # SystemExit, too, is a failure
        return f"{type(error).__name__}: {error}"[:500]
    return None


class Remote:
    """Proxy of an object of the solver that is not plain data. It can be called and read, but not compared."""

    __slots__ = ("_id", "_pipe")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, pipe: Pipe, number: int) -> None:
        object.__setattr__(self, "_pipe", pipe)
        object.__setattr__(self, "_id", number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        sent = {name: encode(value, _refer) for name, value in named.items()}
        return self._send_request("call", *args, named=sent)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._send_request("get", name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("a test cannot change the answer's objects from outside: call their methods")

    def __len__(self) -> int:
        return int(self._send_request("len"))

    def __getitem__(self, key: Any) -> Any:
        return self._send_request("item", key)

    def __contains__(self, value: Any) -> bool:
        return self._send_request("contains", value) is True

    def __iter__(self) -> Any:
        return iter(self._send_request("list"))

    def __eq__(self, other: object) -> bool:
        raise TypeError("the answer returned an object where a test compares: only plain data is compared")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__

    def __bool__(self) -> bool:
        raise TypeError("the answer returned an object where a test asks for a truth value")

    def _send_request(self, what: str, *args: Any, **more: Any) -> Any:
        sent = [encode(value, _refer) for value in args]
        return _exchange(self._pipe, {"do": what, "of": self._id, "args": sent} | more)


def _refer(value: Any) -> int:
    if isinstance(value, Remote):
        number: int = value._id
        return number
    raise TypeError(f"a test can give the answer plain data and its own objects, not {type(value).__name__}")


def _exchange(pipe: Pipe, request: dict[str, Any]) -> Any:
    pipe.send(request)
    try:
        reply = pipe.receive()
    except Closed:
        raise AnswerFailed("the answer's process ended") from None
    error = _read_error(reply)
    if error is not None:
        raise error
    return decode(reply["value"], lambda number: Remote(pipe, number))


def _read_error(reply: Any) -> Exception | None:
    """Return the reply's most specific built-in ``Exception``; other exceptions would end the test loop."""
    if "error" not in reply:
        return None
    text = str(reply.get("text", ""))
    for name in reply["error"]:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                return kind(text)
            except TypeError:  # such as UnicodeDecodeError, which requires more arguments
                continue
    return AnswerFailed(f"{reply['error'][0]}: {text}")
