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
import re

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.base import InlineFormat
from reasoner.tools.formats.call import FunctionTool, MalformedCall
from reasoner.tools.formats.schema_values import convert_value
from reasoner.tools.formats.source import Source

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class QwenXml(InlineFormat):
    """Format of Qwen3-Coder and later models of Qwen."""

    name = "qwen_xml"
    delimiters = (OPENING, CLOSING)
    call_end = CLOSING
    start = re.compile(f"{OPENING}|{FUNCTION}")

    def detect(self, template: str) -> bool:
        return all(mark in template for mark in (OPENING, FUNCTION, PARAMETER))

    def read_calls(self, source: Source, writer: AnswerWriter) -> None:
        is_enclosed = source.accept(OPENING) is not None
        source.expect(FUNCTION)
        name, _ = source.take_until(">")
        writer.add_call(name, _read_parameters(source, writer.find_tool(name)))
        if is_enclosed:
            source.expect(CLOSING)
        else:
            source.accept(CLOSING)


def _read_parameters(source: Source, tool: FunctionTool) -> str:
    """Return the JSON text of the arguments."""
    values: dict[str, str] = {}
    while source.expect(PARAMETER, FUNCTION_END) == PARAMETER:
        name, _ = source.take_until(">")
        written, _ = source.take_until(PARAMETER_END)
        if name in values:
            raise MalformedCall(f"the arguments give {name!r} twice")
        values[name] = convert_value(tool, name, written.removeprefix("\n").removesuffix("\n"))
    members = ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in values.items())
    return f"{{{members}}}"
