"""A response as a stream. Its events and their numbers depend on the job's events alone, so a client that lost its
connection, and even its server, goes on behind the last number that it saw."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from api.http.problems import SHUTTING_DOWN
from api.openai.errors import stream_error
from api.openai.narration import End, Narration
from api.openai.responses.body import Form
from api.openai.responses.object import MessageStatus, Response, message_item, message_status, reasoning_item
from reasoner.budget.usage import Usage
from reasoner.jobs.event import Event
from reasoner.jobs.job import Status
from workers.store.jobs import ShuttingDown
from workers.store.serialization import JobDocument

Json = dict[str, Any]

_TERMINAL = {"completed": "response.completed", "incomplete": "response.incomplete"}
"""All else ends as failed, a cancelled response too: clients know no other end, and its status says what it is."""


class ResponseEvents:
    """One response's: take all events of its job in their order, then ``close``."""

    def __init__(self, job: JobDocument, form: Form) -> None:
        self._job = job | {"usage": Usage().model_dump()}  # until it ends: the same whenever it is read
        self._form = form
        self.story = Narration(job["spec"], concise=form.summary == "concise")
        self._number = 0
        self._telling = False
        self._closing: list[Json] = []

    def take(self, event: Event) -> list[Json]:
        """What an event of the job means for the stream."""
        self._closing = []  # the job was retried: what was to be said at its end is not, and its numbers stay unused
        told = self.story.take(event)
        found: list[Json] = []
        if self._number == 0:
            found += [self._state("response.created", "queued"), self._state("response.queued", "queued")]
        if event.type == "job.started":
            found.append(self._state("response.in_progress", "in_progress"))
        if told:
            found += [] if self._telling else self._beginning()
            found.append(self._part("response.reasoning_summary_text.delta", delta=told))
        if self.story.end is not None:
            self._closing = self._ending(self.story.end)
        return found

    def close(self) -> list[Json]:
        """What is said when the job has ended for good; nothing when it vanished."""
        return self._closing

    def interrupt(self) -> Json:
        """Return what is said when the service ends before the job. It counts for nothing: whoever goes on behind the
        number of the last event misses nothing."""
        error = stream_error(SHUTTING_DOWN).model_dump(exclude={"type"})
        return {"type": "error", "sequence_number": self._number - 1, **error}

    def _beginning(self) -> list[Json]:
        self._telling = True
        return [
            self._event("response.output_item.added", output_index=0, item=self._reasoning(None)),
            self._part("response.reasoning_summary_part.added", part={"type": "summary_text", "text": ""}),
        ]

    def _ending(self, end: End) -> list[Json]:
        text = self.story.text
        found = [
            self._part("response.reasoning_summary_text.done", text=text),
            self._part("response.reasoning_summary_part.done", part={"type": "summary_text", "text": text}),
            self._event("response.output_item.done", output_index=0, item=self._reasoning(text)),
        ]
        if (status := message_status(end)) is not None:
            found += self._message(status, end.content)
        name = _TERMINAL.get(end.status, "response.failed")
        return [*found, self._event(name, response=self._response(self._job))]

    def _message(self, status: MessageStatus, text: str) -> list[Json]:
        whole = message_item(self._job["id"], status, text).model_dump()
        begun = message_item(self._job["id"], "in_progress", text).model_dump()
        place = {"item_id": whole["id"], "output_index": 1, "content_index": 0}
        (part,) = whole["content"]
        return [
            self._event("response.output_item.added", output_index=1, item=begun),
            self._event("response.content_part.added", **place, part=part | {"text": ""}),
            *(
                self._event("response.output_text.delta", **place, delta=line, logprobs=[])
                for line in text.splitlines(keepends=True)
            ),
            self._event("response.output_text.done", **place, text=text, logprobs=[]),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=1, item=whole),
        ]

    def _state(self, name: str, status: Status) -> Json:
        return self._event(name, response=self._response(self._job | {"status": status}))

    def _part(self, name: str, **more: Any) -> Json:
        """Something about the one part of the summary."""
        return self._event(name, item_id=self._reasoning(None)["id"], output_index=0, summary_index=0, **more)

    def _event(self, name: str, **more: Any) -> Json:
        event = {"type": name, "sequence_number": self._number, **more}
        self._number += 1
        return event

    def _reasoning(self, text: str | None) -> Json:
        return reasoning_item(self._job["id"], text).model_dump()

    def _response(self, job: JobDocument) -> Json:
        return Response.of(job, self._form, self.story).model_dump()


def last_sequence_number(stream: ResponseEvents, events: Iterable[Event]) -> int:
    """Of the last event of a stream when these are all events of its job."""
    found = [one for event in events for one in stream.take(event)]
    newest: int = [*found, *stream.close()][-1]["sequence_number"]
    return newest


async def behind(after: int | None, stream: ResponseEvents, events: AsyncIterator[Event]) -> AsyncIterator[Json]:
    """The stream from behind the number ``after``, as the job's ``events`` come, of which there are all."""
    try:
        async for event in events:
            for found in stream.take(event):
                if after is None or found["sequence_number"] > after:
                    yield found
    except ShuttingDown:
        yield stream.interrupt()
        return
    for found in stream.close():
        if after is None or found["sequence_number"] > after:
            yield found
