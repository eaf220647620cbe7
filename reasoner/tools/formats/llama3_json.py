r"""The JSON format of Llama 3.1 to 4: ``{"name": "get_weather", "parameters": {"city": "Paris"}}``.

A special token may announce it, or bare Python code up to the end of the turn, the built-in tool of Llama 3. Several
calls are separated by semicolons or lines. Without the token, only an object at the beginning of a line whose first
fields are these is a call, so that an answer may be JSON.
"""

from __future__ import annotations

import re

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.base import CallFrame, InlineFormat
from reasoner.tools.formats.json_reading import read_call_object
from reasoner.tools.formats.source import Source

TAG = "<|python_tag|>"
_FIELDS = ("parameters", "arguments")
_TYPE = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
_NAME = r'"name"\s*:\s*"[^"\\\n]*"\s*,\s*'
_CALL = re.compile(rf"\{{\s*{_TYPE}\"name\"\s*:")
_OBJECT = rf"^[ \t]*\{{\s*{_TYPE}{_NAME}\"(?:{'|'.join(_FIELDS)})\"\s*:"


class Llama3Json(InlineFormat):
    """Format of Llama 3.1, 3.2, 3.3 and 4 with their own chat templates."""

    name = "llama3_json"
    delimiters = (TAG,)
    frame = CallFrame('{"name": NAME, "parameters": ', "}", "; ", "parameters")
    start = re.compile(f"{re.escape(TAG)}|{_OBJECT}", re.MULTILINE)

    def detect(self, template: str) -> bool:
        return '"name": function name, "parameters": dictionary of argument name' in template

    def read_calls(self, source: Source, writer: AnswerWriter) -> None:
        is_tagged = source.accept(TAG) is not None
        source.peek()
        if is_tagged and writer.has_python and _CALL.match(source.text, source.position) is None:
            writer.add_code(source.text[source.position :])
            source.position = len(source.text)
            return
        while True:
            read_call_object(source, writer, *_FIELDS)
            is_separated = source.accept(";") is not None
            if not is_separated or not source.peek():
                return
