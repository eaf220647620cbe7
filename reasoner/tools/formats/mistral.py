r"""Mistral's formats, which begin with a special token.

Until tokenizer v7 a list of objects follows: ``[TOOL_CALLS] [{"name": "get_weather", "arguments": {}, "id": "…"}]``.
Since v11 each call begins with the token, ``[TOOL_CALLS]get_weather[ARGS]{}``, in some versions with ``[CALL_ID]`` and
an id before the arguments.
"""

from __future__ import annotations

import json

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.base import InlineFormat
from reasoner.tools.formats.json_reading import read_arguments, read_call_object
from reasoner.tools.formats.source import Reading, Source, StartPattern, split_literal

TOKEN = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"


class Mistral(InlineFormat):
    """Format since tokenizer v11: Mistral Small 3.2, Devstral, Magistral and later. Reads the older one as well."""

    name = "mistral"
    delimiters = (TOKEN, CALL_ID, ARGS)
    start = StartPattern(split_literal(TOKEN))

    def detect(self, template: str) -> bool:
        return TOKEN in template and ARGS in template

    def read_calls(self, source: Source, writer: AnswerWriter) -> Reading[None]:
        yield from source.expect(TOKEN)
        if (yield from source.accept("[")) is None:
            yield from _read_named_call(source, writer)
            return
        yield from read_call_object(source, writer, "arguments")
        while (yield from source.expect(",", "]")) == ",":
            yield from read_call_object(source, writer, "arguments")

    def force(self, name: str | None) -> str:
        return TOKEN if name is None else f"{TOKEN}{name}{ARGS}"


class MistralList(Mistral):
    """Format until tokenizer v7: Mistral 7B v0.3, Nemo, Large, Small 3.1. Reads the newer one as well."""

    name = "mistral_list"

    def detect(self, template: str) -> bool:
        return TOKEN in template and ARGS not in template

    def force(self, name: str | None) -> str:
        return f'{TOKEN} [{{"name": ' + ('"' if name is None else f'{json.dumps(name)}, "arguments":')


def _read_named_call(source: Source, writer: AnswerWriter) -> Reading[None]:
    name, end = yield from source.take_until(CALL_ID, ARGS)
    yield writer.begin_call(name.strip())
    if end == CALL_ID:
        yield from source.take_until(ARGS)
    yield from read_arguments(source, writer)
