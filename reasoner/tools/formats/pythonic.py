"""The format of Llama 3.2 and 4 that is a Python list of calls: ``[get_weather(city="Paris", days=2), get_time()]``.

Arguments are given by name and are literals; ``true``, ``false`` and ``null`` are those of JSON. Nothing is run. Only a
list at the beginning of a line, or after a special token, is a list of calls.
"""

from __future__ import annotations

import ast
import re

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.base import InlineFormat
from reasoner.tools.formats.call import MAX_DEPTH, MalformedCall, excerpt, make_object
from reasoner.tools.formats.json_reading import write_json
from reasoner.tools.formats.source import Source

TAG, BEGIN, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
_NAME_PART = r"[A-Za-z_][\w.-]*"
_OPENING = rf"^[ \t]*\[\s*{_NAME_PART}\s*\(\s*(?:\)|[\"']|{_NAME_PART}\s*=)"
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
_TOKEN = re.compile(r"\"\"\"|'''|[\"'()\[\]{}]")
_STRING_TOKENS = {quote: re.compile(rf"\\|{quote}") for quote in ('"""', "'''", '"', "'")}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_STRING_TEXT = (
    r"""(?P<prefix>\b[A-Za-z]+)?(?:(?P<quotes>\"{3}|'{3})(?:\\.|(?!(?P=quotes)).)*(?P=quotes)"""
    r"""|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
)
_STRING = re.compile(_STRING_TEXT, re.DOTALL)
_PART = re.compile(rf"{_STRING_TEXT}|[,()\[\]{{}}]", re.DOTALL)
_ARGUMENT = re.compile(r"(?P<name>[A-Za-z_][\w.-]*)\s*=(?!=)\s*(?P<value>.+)", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = frozenset("\\'\"abfnrtvxuUN01234567\n")
"""Characters that have a meaning after a backslash."""


class Pythonic(InlineFormat):
    """Format of Llama 3.2 and 4 with chat templates that ask for Python."""

    name = "pythonic"
    delimiters = (TAG, BEGIN, END)
    start = re.compile(rf"{re.escape(TAG)}|{re.escape(BEGIN)}|{_OPENING}", re.MULTILINE)

    def detect(self, template: str) -> bool:
        return "[func_name1(" in template

    def read_calls(self, source: Source, writer: AnswerWriter) -> None:
        source.accept(TAG, BEGIN)
        source.expect("[")
        while True:
            name, _ = source.take_until("(")
            writer.find_tool(name.strip())
            writer.add_call(name.strip(), _convert_arguments(name.strip(), _read_balanced(source)))
            if source.expect(",", "]") == "]":
                break
            if source.accept("]") is not None:
                break
        source.accept(END)


def _read_balanced(source: Source) -> str:
    """Read up to the bracket that closes the one before the position, and return the text between them."""
    text, start = source.text, source.position
    open_brackets = ["("]
    quote: str | None = None
    while open_brackets:
        match = (_TOKEN if quote is None else _STRING_TOKENS[quote]).search(text, source.position)
        if match is None:
            raise MalformedCall(f"the arguments are not complete: {excerpt(text, start)}")
        token = match.group()
        source.position = match.end() + (token == "\\")
        if token == "\\" or token == quote:
            quote = quote if token == "\\" else None
        elif token in _STRING_TOKENS:
            quote = token
        elif token in _CLOSING:
            open_brackets.append(token)
            if len(open_brackets) > MAX_DEPTH:
                raise MalformedCall(f"the arguments are nested more than {MAX_DEPTH} deep")
        elif token != _CLOSING[open_brackets.pop()]:
            where = excerpt(text, match.start())
            raise MalformedCall(f"the arguments are not Python: no bracket is closed by {where}")
    return text[start : source.position - 1]


def _convert_arguments(name: str, body: str) -> str:
    """Return the JSON text of the arguments between the parentheses of a call."""
    members: list[tuple[str, object]] = []
    for written in _split_at_commas(body):
        argument = _ARGUMENT.fullmatch(written)
        if argument is None:
            raise MalformedCall(f"the arguments of {name!r} must be given as name=value, not as {excerpt(written)}")
        members.append((argument.group("name"), _parse_literal(argument.group("value"))))
    arguments = make_object(members)
    try:
        return write_json(arguments)
    except ValueError as error:
        raise MalformedCall(f"the arguments of {name!r} have no JSON: {error}") from None


def _split_at_commas(body: str) -> list[str]:
    """Return the arguments one by one. Their names may be keywords of Python, which does not split them then."""
    parts, depth, start = [], 0, 0
    for match in _PART.finditer(body):
        token = match.group()
        depth += (token in _CLOSING) - (token in _CLOSING.values())
        if token == "," and not depth:
            parts.append(body[start : match.start()].strip())
            start = match.end()
    last = body[start:].strip()
    return [*parts, last] if last else parts


def _parse_literal(written: str) -> object:
    try:
        node = ast.parse(f"({_STRING.sub(_double_backslashes, written)}\n)", mode="eval").body
        return _read_literal(node)
    except SyntaxError as error:
        raise MalformedCall(f"{excerpt(written)} is not Python: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise MalformedCall(f"{excerpt(written)} is too complex for a literal") from None


def _double_backslashes(match: re.Match[str]) -> str:
    """Double the backslashes that escape nothing in a string: Python keeps them as they are, but warns."""
    if "r" in (match.group("prefix") or "").lower():
        return match.group()
    return _ESCAPE.sub(
        lambda escape: escape.group() if escape.group(1) in _ESCAPED else "\\" + escape.group(), match.group()
    )


def _read_literal(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _JSON_CONSTANTS:
            return _JSON_CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_read_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_read_literal(key) if key is not None else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise MalformedCall(f"the keys of an object must be strings, not {excerpt(ast.unparse(node))}")
            return make_object([(str(name), _read_literal(value)) for name, value in zip(names, values, strict=True)])
    raise MalformedCall(f"an argument must be a literal, not {excerpt(ast.unparse(node))}")
