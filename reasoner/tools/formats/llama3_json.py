r"""The JSON format of Llama 3.1 to 4: ``{"name": "get_weather", "parameters": {"city": "Paris"}}``.

A special token may announce it. Several calls are separated by semicolons or lines. Without the token, only an object
at the beginning of a line whose first fields are these is a call, so that an answer may be JSON.
"""

from __future__ import annotations

import json

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.base import InlineFormat
from reasoner.tools.formats.json_reading import read_call_object
from reasoner.tools.formats.source import Reading, Source, StartPattern, split_literal

TAG = "<|python_tag|>"
_FIELDS = ("parameters", "arguments")
_COLON = (r"\s*", ":", r"\s*")
_COMMA = (r"\s*", ",", r"\s*")
_TYPE = (*split_literal('"type"'), *_COLON, *split_literal('"function"'), *_COMMA)
_NAME = (*split_literal('"name"'), *_COLON, '"', r'[^"\\\n]*', '"', *_COMMA)
_OBJECT = (r"^[ \t]*\{", r"\s*")


class Llama3Json(InlineFormat):
    """Format of Llama 3.1, 3.2, 3.3 and 4 with their own chat templates."""

    name = "llama3_json"
    delimiters = (TAG,)
    start = StartPattern(
        split_literal(TAG),
        *(
            (*_OBJECT, *before, *_NAME, *split_literal(f'"{field}"'), r"\s*", ":")
            for before in ((), _TYPE)
            for field in _FIELDS
        ),
    )

    def detect(self, template: str) -> bool:
        return '"name": function name, "parameters": dictionary of argument name' in template

    def read_calls(self, source: Source, writer: AnswerWriter) -> Reading[None]:
        yield from source.accept(TAG)
        while True:
            yield from read_call_object(source, writer, *_FIELDS)
            is_separated = (yield from source.accept(";")) is not None
            if not is_separated or not (yield from source.peek()):
                return

    def force(self, name: str | None) -> str:
        return '{"name": ' + ('"' if name is None else f'{json.dumps(name)}, "parameters":')
