"""Reading of JSON in the midst of a text."""

from __future__ import annotations

import json
import re

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.call import MAX_DEPTH, MalformedCall, check_arguments, excerpt
from reasoner.tools.formats.source import Source

_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_SPECIAL = re.compile(r'["\\]')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CLOSING = {"{": "}", "[": "]"}
_OTHER_FIELDS = ("id", "type")
"""Fields beside the name and the arguments that models write, and that change nothing."""


def read_call_object(source: Source, writer: AnswerWriter, *argument_fields: str) -> None:
    """Read a call that is written as a JSON object with ``name`` and one of the fields for the arguments."""
    source.expect("{")
    fields: dict[str, str] = {}
    while True:
        field = read_string(source)
        kind = "arguments" if field in argument_fields else field
        if kind in fields:
            raise MalformedCall(f"a call has {field!r} twice")
        source.expect(":")
        if kind == "arguments":
            fields[kind] = read_arguments(source)
        elif kind in ("name", *_OTHER_FIELDS):
            fields[kind] = read_string(source)
        else:
            raise MalformedCall(f"a call has no field {field!r}, only 'name' and {argument_fields[0]!r}")
        if kind == "name":
            writer.find_tool(fields[kind])
        if source.expect(",", "}") == "}":
            break
    for kind, field in (("name", "name"), ("arguments", argument_fields[0])):
        if kind not in fields:
            raise MalformedCall(f"a call has no {field!r}")
    writer.add_call(fields["name"], fields["arguments"])


def read_arguments(source: Source) -> str:
    """Read a JSON object after white space, and return its text."""
    if source.peek() != "{":
        raise source.refuse("a JSON object with the arguments")
    start = source.position
    open_brackets: list[str] = []
    is_string = False
    while not source.position > start or open_brackets:
        match = (_STRING_SPECIAL if is_string else _STRUCTURE).search(source.text, source.position)
        if match is None:
            raise MalformedCall(f"the arguments are not complete: {excerpt(source.text, start)}")
        char = match.group()
        source.position = match.end() + (char == "\\")
        if char == '"':
            is_string = not is_string
        elif char in _CLOSING:
            open_brackets.append(char)
            if len(open_brackets) > MAX_DEPTH:
                raise MalformedCall(f"the arguments are nested more than {MAX_DEPTH} deep")
        elif char != "\\" and char != _CLOSING[open_brackets.pop()]:
            where = excerpt(source.text, match.start())
            raise MalformedCall(f"the arguments are not JSON: no bracket is closed by {where}")
    arguments = source.text[start : source.position]
    check_arguments(arguments)
    return arguments


def read_string(source: Source) -> str:
    """Read a JSON string after white space, and return its value."""
    if source.peek() != '"':
        raise source.refuse("a JSON string")
    match = _STRING.match(source.text, source.position)
    if match is None:
        raise MalformedCall(f"a string is not complete: {excerpt(source.text, source.position)}")
    source.position = match.end()
    try:
        value: str = json.loads(match.group())
    except ValueError as error:
        raise MalformedCall(f"{excerpt(match.group())} is not a JSON string: {error}") from None
    return value


def write_json(value: object) -> str:
    """Return the JSON text of a value, with escapes only where needed. Raises ``ValueError`` if it has none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match.group()):04x}", text)
