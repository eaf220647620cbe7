r"""Harmony, the format of gpt-oss: an answer is a sequence of messages with headers.

::

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather
    <|constrain|>json<|message|>{"city": "Paris"}<|call|>

without line breaks. The recipient may also come before the channel. The text of the answer is that of the messages
without a recipient, apart from the analysis: that is the model's thought, which is not shown.

A prompt ends in ``<|start|>assistant``, so the first header lacks it. The first message has no header at all if the
prompt goes on to open it.
"""

from __future__ import annotations

import re

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.base import ToolFormat
from reasoner.tools.formats.call import MalformedCall, excerpt
from reasoner.tools.formats.json_reading import read_arguments
from reasoner.tools.formats.source import Reading, Source, StartPattern, read_text, split_literal

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
NAMESPACE = "functions."
_ROLE = "assistant"
_FIRST_RECIPIENT = "to=" + NAMESPACE
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
_TO = (r"\s*", "t", "o", "=")
_TO_AFTER_CHANNEL = (*split_literal(CHANNEL), r"\w*", *_TO)
_FIRST_CHANNEL = (r"\A\s*<", *split_literal(CHANNEL[1:]), r"\w*", *_TO)
_MESSAGE_END = StartPattern(*(split_literal(token) for token in (START, END, CALL, RETURN)))


class Harmony(ToolFormat):
    """Format of gpt-oss."""

    name = "harmony"
    delimiters = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
    start = StartPattern(
        (*split_literal(START + _ROLE), *_TO),
        (*split_literal(START + _ROLE), *_TO_AFTER_CHANNEL),
        _FIRST_CHANNEL,
        (r"\A\s*t", *split_literal(_FIRST_RECIPIENT[1:])),
    )

    def detect(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def read(self, source: Source, writer: AnswerWriter) -> Reading[None]:
        header = yield from _read_first_header(source)
        while True:
            yield from _read_message(source, writer, header)
            yield from source.accept(END, CALL, RETURN)
            if not (yield from source.peek()):
                return
            yield from source.expect(START)
            header = yield from _read_header(source)

    def force(self, name: str | None) -> str:
        begin = f"{CHANNEL}commentary to={NAMESPACE}"
        return begin if name is None else f"{begin}{name} {CONSTRAIN}json{MESSAGE}"


def _read_first_header(source: Source) -> Reading[str]:
    """Return the header of the first message, or an empty text if the prompt has it."""
    begin = yield from source.accept(START, CHANNEL, _FIRST_RECIPIENT)
    if begin is None:
        source.position = 0  # a white space at the beginning is text
        return ""
    rest = yield from _read_header(source)
    return begin + rest


def _read_header(source: Source) -> Reading[str]:
    begin = source.position
    try:
        header, _ = yield from source.take_until(MESSAGE)
    except MalformedCall:
        if "to=" in source.text[begin:]:
            raise
        source.position = len(source.text)  # the beginning of a header is no text
        return ""
    return header


def _read_message(source: Source, writer: AnswerWriter, header: str) -> Reading[None]:
    recipient = _RECIPIENT.search(header)
    if recipient is not None:
        yield from _read_call(source, writer, recipient.group(1))
        return
    channel = _CHANNEL_NAME.search(header)
    if channel is not None and channel.group(1) == "analysis":
        for delta in read_text(source, AnswerWriter(()), _MESSAGE_END):
            if delta is None:
                yield None
    else:
        yield from read_text(source, writer, _MESSAGE_END)


def _read_call(source: Source, writer: AnswerWriter, recipient: str) -> Reading[None]:
    if not recipient.startswith(NAMESPACE):
        raise MalformedCall(f"a call is to {NAMESPACE + 'NAME'!r}, not to {excerpt(recipient)}")
    yield writer.begin_call(recipient.removeprefix(NAMESPACE))
    yield from read_arguments(source, writer)
