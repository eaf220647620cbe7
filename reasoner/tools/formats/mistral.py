r"""Mistral's formats, which begin with a special token.

Until tokenizer v7 a list of objects follows: ``[TOOL_CALLS] [{"name": "get_weather", "arguments": {}, "id": "…"}]``.
Since v11 each call begins with the token, ``[TOOL_CALLS]get_weather[ARGS]{}``, in some versions with ``[CALL_ID]`` and
an id before the arguments.
"""

from __future__ import annotations

import re

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.base import InlineFormat
from reasoner.tools.formats.json_reading import read_arguments, read_call_object
from reasoner.tools.formats.source import Source

TOKEN = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"


class Mistral(InlineFormat):
    """Both formats of Mistral: Nemo, Large and Small 3.1 write the list, Small 3.2, Devstral and later the names."""

    name = "mistral"
    delimiters = (TOKEN, CALL_ID, ARGS)
    start = re.compile(re.escape(TOKEN))

    def detect(self, template: str) -> bool:
        return TOKEN in template

    def read_calls(self, source: Source, writer: AnswerWriter) -> None:
        source.expect(TOKEN)
        if source.accept("[") is None:
            _read_named_call(source, writer)
            return
        read_call_object(source, writer, "arguments")
        while source.expect(",", "]") == ",":
            read_call_object(source, writer, "arguments")


def _read_named_call(source: Source, writer: AnswerWriter) -> None:
    name, end = source.take_until(CALL_ID, ARGS)
    writer.find_tool(name.strip())
    if end == CALL_ID:
        source.take_until(ARGS)
    writer.add_call(name.strip(), read_arguments(source))
