"""Reading of JSON in a text that may still grow."""

from __future__ import annotations

import json
import re

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.call import MAX_DEPTH, MalformedCall, check_arguments, excerpt
from reasoner.tools.formats.source import Reading, Source

_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_SPECIAL = re.compile(r'["\\]')
_CLOSING = {"{": "}", "[": "]"}
_OTHER_FIELDS = ("id", "type")
"""Fields beside the name and the arguments that models write, and that change nothing."""


def read_call_object(source: Source, writer: AnswerWriter, *argument_fields: str) -> Reading[None]:
    """Read a call that is written as a JSON object with ``name`` and one of the fields for the arguments."""
    yield from source.expect("{")
    fields: set[str] = set()
    name: str | None = None
    early: str | None = None  # arguments that come before the name
    while True:
        field = yield from read_string(source)
        kind = "arguments" if field in argument_fields else field
        if kind in fields:
            raise MalformedCall(f"a call has {field!r} twice")
        fields.add(kind)
        yield from source.expect(":")
        if kind == "name":
            name = yield from read_string(source)
            yield writer.begin_call(name)
            if early is not None:
                yield writer.write_arguments(early)
        elif kind == "arguments":
            early = yield from read_arguments(source, writer if name is not None else None)
        elif kind in _OTHER_FIELDS:
            yield from read_string(source)
        else:
            raise MalformedCall(f"a call has no field {field!r}, only 'name' and {argument_fields[0]!r}")
        if (yield from source.expect(",", "}")) == "}":
            break
    for kind, field in (("name", "name"), ("arguments", argument_fields[0])):
        if kind not in fields:
            raise MalformedCall(f"a call has no {field!r}")


def read_arguments(source: Source, writer: AnswerWriter | None) -> Reading[str]:
    """Read a JSON object after white space, and return its text. Yields it piece by piece to a writer."""
    if (yield from source.peek()) != "{":
        raise source.refuse("a JSON object with the arguments")
    start = sent = source.position
    open_brackets: list[str] = []
    is_string = False
    while True:
        is_string = _scan(source, open_brackets, is_string)
        if writer is not None and sent < source.position:
            yield writer.write_arguments(source.text[sent : source.position])
            sent = source.position
        if not open_brackets:
            arguments = source.text[start : source.position]
            check_arguments(arguments)
            return arguments
        if source.is_final:
            raise MalformedCall(f"the arguments are not complete: {excerpt(source.text, start)}")
        yield None


def _scan(source: Source, open_brackets: list[str], is_string: bool) -> bool:
    """Read up to the end of an object or of the text, and return True if that is within a string."""
    text = source.text
    while True:
        match = (_STRING_SPECIAL if is_string else _STRUCTURE).search(text, source.position)
        if match is None:
            source.position = len(text)
            return is_string
        char, index = match.group(), match.start()
        if char == "\\":
            if index + 1 == len(text):
                source.position = index
                return True
            source.position = index + 2
            continue
        source.position = index + 1
        if char == '"':
            is_string = not is_string
        elif char in _CLOSING:
            open_brackets.append(char)
            if len(open_brackets) > MAX_DEPTH:
                raise MalformedCall(f"the arguments are nested more than {MAX_DEPTH} deep")
        elif char != _CLOSING[open_brackets.pop()]:
            raise MalformedCall(f"the arguments are not JSON: no bracket is closed by {excerpt(text, index)}")
        elif not open_brackets:
            return False


def read_string(source: Source) -> Reading[str]:
    """Read a JSON string after white space, and return its value."""
    if (yield from source.peek()) != '"':
        raise source.refuse("a JSON string")
    start = source.position
    source.position += 1
    while True:
        match = _STRING_SPECIAL.search(source.text, source.position)
        if match is not None and match.group() == '"':
            source.position = match.end()
            break
        if match is not None and match.end() < len(source.text):
            source.position = match.end() + 1
            continue
        if source.is_final:
            raise MalformedCall(f"a string is not complete: {excerpt(source.text, start)}")
        source.position = len(source.text) if match is None else match.start()
        yield None
    written = source.text[start : source.position]
    try:
        value: str = json.loads(written)
    except ValueError as error:
        raise MalformedCall(f"{excerpt(written)} is not a JSON string: {error}") from None
    return value


def write_json(value: object) -> str:
    """Return the JSON text of a value, with escapes only where needed. Raises ``ValueError`` if it has none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match.group()):04x}", text)
