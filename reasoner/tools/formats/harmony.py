r"""Harmony, the format of gpt-oss: an answer is a sequence of messages with headers.

::

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather
    <|constrain|>json<|message|>{"city": "Paris"}<|call|>

without line breaks. The recipient may also come before the channel. The text of the answer is that of the messages
without a recipient, apart from the analysis: that is the model's thought, which is not shown. A message to ``python``
is bare code instead of JSON.

A prompt ends in ``<|start|>assistant``, so the first header lacks it. The first message has no header at all if the
prompt goes on to open it.
"""

from __future__ import annotations

import re

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.base import ToolFormat
from reasoner.tools.formats.call import PYTHON, MalformedCall, excerpt
from reasoner.tools.formats.json_reading import read_arguments
from reasoner.tools.formats.source import Source, read_text

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
NAMESPACE = "functions."
_FIRST_RECIPIENTS = ("to=" + NAMESPACE, "to=" + PYTHON)
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
_MESSAGE_END = re.compile("|".join(map(re.escape, (START, END, CALL, RETURN))))


class Harmony(ToolFormat):
    """Format of gpt-oss."""

    name = "harmony"
    delimiters = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
    has_channels = True
    start = re.compile(r"(?:<\|(?:start|channel)\|>[^<]*|^\s*)\bto=\w")
    call_end = CALL

    def detect(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def read(self, source: Source, writer: AnswerWriter) -> None:
        header = _read_first_header(source)
        while True:
            _read_message(source, writer, header)
            source.accept(END, CALL, RETURN)
            if not source.peek():
                return
            source.expect(START)
            header = _read_header(source)


def _read_first_header(source: Source) -> str:
    """Return the header of the first message, or an empty text if the prompt has it."""
    begin = source.accept(START, CHANNEL, *_FIRST_RECIPIENTS)
    if begin is None:
        source.position = 0  # a white space at the beginning is text
        return ""
    rest = _read_header(source)
    return begin + rest


def _read_header(source: Source) -> str:
    begin = source.position
    try:
        header, _ = source.take_until(MESSAGE)
    except MalformedCall:
        if "to=" in source.text[begin:]:
            raise
        source.position = len(source.text)  # the beginning of a header is no text
        return ""
    return header


def _read_message(source: Source, writer: AnswerWriter, header: str) -> None:
    recipient = _RECIPIENT.search(header)
    if recipient is not None:
        _read_call(source, writer, recipient.group(1))
        return
    channel = _CHANNEL_NAME.search(header)
    if channel is not None and channel.group(1) == "analysis":
        read_text(source, AnswerWriter(()), _MESSAGE_END)
    else:
        read_text(source, writer, _MESSAGE_END)


def _read_call(source: Source, writer: AnswerWriter, recipient: str) -> None:
    if recipient == PYTHON and writer.has_python:
        end = _MESSAGE_END.search(source.text, source.position)
        stop = len(source.text) if end is None else end.start()
        writer.add_code(source.text[source.position : stop])
        source.position = stop
        return
    if not recipient.startswith(NAMESPACE):
        raise MalformedCall(f"a call is to {NAMESPACE + 'NAME'!r}, not to {excerpt(recipient)}")
    name = recipient.removeprefix(NAMESPACE)
    writer.find_tool(name)
    writer.add_call(name, read_arguments(source))
