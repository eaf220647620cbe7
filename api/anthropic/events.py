"""A message as a stream of events, and the content of both forms.

The events depend on those of the job alone, so that the message of a stream is that of a plain request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from api.anthropic.body import Display
from api.anthropic.errors import stream_error
from api.anthropic.message import Content, Message, Text, Thinking, ToolUse, build_content, build_message, find_stop
from api.conversation.calls import split_arguments
from api.conversation.failures import INTERRUPTIONS, failure_problem, interruption_problem
from api.conversation.narration import JobEnd, Narration, ReasoningContent
from api.http.problems import Problem
from reasoner.jobs.events import Event
from workers.store.serialization import JobDocument

Json = dict[str, Any]
PING = 'event: ping\ndata: {"type": "ping"}\n\n'


class MessageReader:
    """Reads the events of a job for its message: the text of the thinking block, then the whole content."""

    def __init__(self, job: JobDocument, display: Display | None, wanted: ReasoningContent | None) -> None:
        self._job = job
        self._display = display
        self._narrates = None if wanted is None else wanted == "narration"
        """True if thinking is the narration; ``None`` until a part of a branch tells if the model thinks."""
        self._narration = Narration(job["spec"])

    @property
    def end(self) -> JobEnd | None:
        """The end of the job, once it has ended."""
        return self._narration.end

    def add(self, event: Event) -> None:
        """Read the next event."""
        self._narration.add(event)
        if self._narrates is None and self._narration.has_thoughts is not None:
            self._narrates = not self._narration.has_thoughts

    @property
    def narrated(self) -> str:
        """The text of the thinking block so far, if that is the narration."""
        return self._narration.text if self._display == "summarized" and self._narrates else ""

    def build_message(self) -> Message:
        """Return the whole message. Raises ``Problem`` for a job without a result."""
        end = self.end
        if end is None or end.result is None or end.status == "cancelled":
            raise failure_problem(end)
        content = build_content(self._job["id"], end, self._find_thinking(end))
        return build_message(self._job, content, find_stop(end), end=end)

    def _find_thinking(self, end: JobEnd) -> str | None:
        """Return the text of the thinking block; ``None``: there is none."""
        if self._display != "summarized":
            return None if self._display is None else ""
        thought = end.result.thought if end.result is not None else None
        return (self._narration.text if self._narrates in (None, True) else thought) or None


async def stream_events(
    job: JobDocument, reader: MessageReader, events: AsyncIterator[Event], request_id: str | None
) -> AsyncIterator[str]:
    """Yield the server-sent events: the narration while the search runs, if that is to be shown, then the answer.

    A failed search, and a service that shuts down, end the stream with an error.
    """
    yield _format({"type": "message_start", "message": build_message(job).model_dump(exclude={"reasoner"})})
    num_sent = 0
    try:
        async for event in events:
            reader.add(event)
            text = reader.narrated
            if num_sent == 0 and text:
                yield _format(_begin(0, Thinking(thinking="", signature="")))
            if text[num_sent:]:
                yield _format(_delta(0, {"type": "thinking_delta", "thinking": text[num_sent:]}))
                num_sent = len(text)
    except INTERRUPTIONS as error:
        yield _format(stream_error(interruption_problem(error), request_id).model_dump())
        return
    try:
        message = reader.build_message()
    except Problem as problem:
        yield _format(stream_error(problem, request_id).model_dump())
        return
    for index, block in enumerate(message.content):
        for part in _send_block(index, block, num_sent if index == 0 else 0):
            yield _format(part)
    stop = message.model_dump(include={"stop_reason", "stop_sequence", "stop_details"})
    report = message.model_dump(include={"usage", "reasoner"})
    yield _format({"type": "message_delta", "delta": stop, **report})
    yield _format({"type": "message_stop"})


def _send_block(index: int, block: Content, num_sent: int) -> Iterator[Json]:
    """Yield the events of a block, of whose thinking ``num_sent`` characters have been sent."""
    match block:
        case Thinking():
            if not num_sent:
                yield _begin(index, Thinking(thinking="", signature=""))
            for line in block.thinking[num_sent:].splitlines(keepends=True):
                yield _delta(index, {"type": "thinking_delta", "thinking": line})
            yield _delta(index, {"type": "signature_delta", "signature": block.signature})
        case Text():
            yield _begin(index, Text(text=""))
            for line in block.text.splitlines(keepends=True):
                yield _delta(index, {"type": "text_delta", "text": line})
        case ToolUse():
            yield _begin(index, block.model_copy(update={"input": {}}))
            for piece in split_arguments(json.dumps(block.input, ensure_ascii=False)):
                yield _delta(index, {"type": "input_json_delta", "partial_json": piece})
    yield {"type": "content_block_stop", "index": index}


def _begin(index: int, block: Content) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block.model_dump()}


def _delta(index: int, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _format(event: Json) -> str:
    # ASCII: many clients end a line at U+2028 or U+0085 too, which a text may contain.
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
