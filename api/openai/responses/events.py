"""A response as a stream of events.

The events and their numbers depend on the events of the job alone, so that a client which lost its connection can
continue after the last number it saw, on any server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from api.conversation.calls import split_arguments
from api.conversation.failures import DELETED, INTERRUPTIONS, interruption_problem
from api.conversation.narration import JobEnd, Narration
from api.http.problems import Problem
from api.openai.errors import stream_error
from api.openai.functions import FunctionCallItem, build_call_item
from api.openai.responses.body import EchoedFields
from api.openai.responses.object import (
    MessageStatus,
    Response,
    message_item,
    message_status,
    reasoning_item,
    response_status,
)
from reasoner.budget.usage import Usage
from reasoner.jobs.events import Event
from reasoner.jobs.job import Status
from workers.store.serialization import JobDocument

Json = dict[str, Any]

_TERMINAL = {"completed": "response.completed", "incomplete": "response.incomplete"}
"""Last event by status. Any other status ends as ``response.failed``, since clients have no event for cancelled ones.
"""


class ResponseEvents:
    """Turns the events of a job, added in their order, into the events of its response; ``close`` returns the last."""

    def __init__(self, job: JobDocument, echoed: EchoedFields) -> None:
        self._job = job | {"usage": Usage().model_dump()}  # so that the events are the same whenever the job is read
        self._echoed = echoed
        self.narration = Narration(job["spec"], concise=echoed.summary == "concise")
        self._next_number = 0
        self._has_begun = False
        self._last_events: list[Json] = []

    def add(self, event: Event) -> list[Json]:
        """Return the stream events for the next event of the job."""
        self._last_events = []  # discarded if the job was retried; their numbers stay unused
        text = self.narration.add(event)
        events: list[Json] = []
        if self._next_number == 0:
            events += [
                self._status_event("response.created", "queued"),
                self._status_event("response.queued", "queued"),
            ]
        if event.type == "job.started":
            events.append(self._status_event("response.in_progress", "in_progress"))
        if text:
            events += [] if self._has_begun else self._begin_reasoning()
            events.append(self._summary_event("response.reasoning_summary_text.delta", delta=text))
        if self.narration.end is not None:
            self._last_events = self._build_last_events(self.narration.end)
        return events

    def close(self) -> list[Json]:
        """Return the last events of a job that will not be retried: an error if it was deleted."""
        return self._last_events or [self.interrupt(DELETED)]

    def interrupt(self, problem: Problem) -> Json:
        """Return the event of an error for which the stream ends before the job does.

        It repeats the last number, so that a client which continues after it misses nothing.
        """
        error = stream_error(problem).model_dump(exclude={"type"})
        return {"type": "error", "sequence_number": max(0, self._next_number - 1), **error}

    def _begin_reasoning(self) -> list[Json]:
        self._has_begun = True
        return [
            self._build_event("response.output_item.added", output_index=0, item=self._reasoning_item(None)),
            self._summary_event("response.reasoning_summary_part.added", part={"type": "summary_text", "text": ""}),
        ]

    def _build_last_events(self, end: JobEnd) -> list[Json]:
        text = self.narration.text
        events = [
            self._summary_event("response.reasoning_summary_text.done", text=text),
            self._summary_event("response.reasoning_summary_part.done", part={"type": "summary_text", "text": text}),
            self._build_event("response.output_item.done", output_index=0, item=self._reasoning_item(text)),
        ]
        if (status := message_status(end)) is not None:
            events += self._message_events(status, end.content)
        index = 1 if status is None else 2
        for number, call in enumerate(end.result.tool_calls if end.result is not None else ()):
            events += self._call_events(index + number, build_call_item(self._job["id"], number, call))
        name = _TERMINAL.get(response_status(end), "response.failed")
        return [*events, self._build_event(name, response=self._build_response(self._job))]

    def _message_events(self, status: MessageStatus, text: str) -> list[Json]:
        whole = message_item(self._job["id"], status, text).model_dump()
        started = message_item(self._job["id"], "in_progress", text).model_dump()
        part_location = {"item_id": whole["id"], "output_index": 1, "content_index": 0}
        (part,) = whole["content"]
        return [
            self._build_event("response.output_item.added", output_index=1, item=started),
            self._build_event("response.content_part.added", **part_location, part=part | {"text": ""}),
            *(
                self._build_event("response.output_text.delta", **part_location, delta=line, logprobs=[])
                for line in text.splitlines(keepends=True)
            ),
            self._build_event("response.output_text.done", **part_location, text=text, logprobs=[]),
            self._build_event("response.content_part.done", **part_location, part=part),
            self._build_event("response.output_item.done", output_index=1, item=whole),
        ]

    def _call_events(self, index: int, call: FunctionCallItem) -> list[Json]:
        started = call.model_copy(update={"status": "in_progress", "arguments": ""}).model_dump()
        place = {"item_id": call.id, "output_index": index}
        return [
            self._build_event("response.output_item.added", output_index=index, item=started),
            *(
                self._build_event("response.function_call_arguments.delta", **place, delta=piece)
                for piece in split_arguments(call.arguments)
            ),
            self._build_event(
                "response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments
            ),
            self._build_event("response.output_item.done", output_index=index, item=call.model_dump()),
        ]

    def _status_event(self, name: str, status: Status) -> Json:
        return self._build_event(name, response=self._build_response(self._job | {"status": status}))

    def _summary_event(self, name: str, **more: Any) -> Json:
        """Return an event about the only part of the reasoning summary."""
        return self._build_event(
            name, item_id=self._reasoning_item(None)["id"], output_index=0, summary_index=0, **more
        )

    def _build_event(self, name: str, /, **more: Any) -> Json:
        event = {"type": name, "sequence_number": self._next_number, **more}
        self._next_number += 1
        return event

    def _reasoning_item(self, text: str | None) -> Json:
        return reasoning_item(self._job["id"], text).model_dump()

    def _build_response(self, job: JobDocument) -> Json:
        return Response.from_job(job, self._echoed, self.narration).model_dump()


def last_sequence_number(stream: ResponseEvents, events: Iterable[Event]) -> int:
    """Return the number of the last event of a stream, given all events of its job."""
    stream_events = [stream_event for event in events for stream_event in stream.add(event)]
    newest: int = [*stream_events, *stream.close()][-1]["sequence_number"]
    return newest


async def stream_after(after: int | None, stream: ResponseEvents, events: AsyncIterator[Event]) -> AsyncIterator[Json]:
    """Yield the stream events after number ``after``, given all ``events`` of the job from its first."""
    try:
        async for event in events:
            for stream_event in stream.add(event):
                if after is None or stream_event["sequence_number"] > after:
                    yield stream_event
    except INTERRUPTIONS as error:
        yield stream.interrupt(interruption_problem(error))
        return
    for stream_event in stream.close():
        if after is None or stream_event["sequence_number"] > after:
            yield stream_event
