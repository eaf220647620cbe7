r"""The format of Qwen3-Coder: arguments between tags, without quotes.

::

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A value has no type of its own: the function's JSON Schema says if ``5`` is a number or a text. Qwen3-Coder sometimes
omits the outer tags.
"""

from __future__ import annotations

import json

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.base import InlineFormat
from reasoner.tools.formats.call import FunctionTool, MalformedCall
from reasoner.tools.formats.schema_values import convert_value
from reasoner.tools.formats.source import Reading, Source, StartPattern, split_literal

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class QwenXml(InlineFormat):
    """Format of Qwen3-Coder and later models of Qwen."""

    name = "qwen_xml"
    delimiters = (OPENING, CLOSING)
    start = StartPattern(split_literal(OPENING), split_literal(FUNCTION))

    def detect(self, template: str) -> bool:
        return all(mark in template for mark in (OPENING, FUNCTION, PARAMETER))

    def read_calls(self, source: Source, writer: AnswerWriter) -> Reading[None]:
        is_enclosed = (yield from source.accept(OPENING)) is not None
        yield from source.expect(FUNCTION)
        name, _ = yield from source.take_until(">")
        yield writer.begin_call(name)
        yield from _read_parameters(source, writer, writer.find_tool(name))
        if is_enclosed:
            yield from source.expect(CLOSING)
        else:
            yield from source.accept(CLOSING)

    def force(self, name: str | None) -> str:
        begin = f"{OPENING}\n{FUNCTION}"
        return begin if name is None else f"{begin}{name}>\n"


def _read_parameters(source: Source, writer: AnswerWriter, tool: FunctionTool) -> Reading[None]:
    names: set[str] = set()
    while (yield from source.expect(PARAMETER, FUNCTION_END)) == PARAMETER:
        name, _ = yield from source.take_until(">")
        written, _ = yield from source.take_until(PARAMETER_END)
        if name in names:
            raise MalformedCall(f"the arguments give {name!r} twice")
        value = convert_value(tool, name, written.removeprefix("\n").removesuffix("\n"))
        yield writer.write_arguments(f"{', ' if names else '{'}{json.dumps(name, ensure_ascii=False)}: {value}")
        names.add(name)
    yield writer.write_arguments("}" if names else "{}")
