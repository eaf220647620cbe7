"""The messages of a conversation, and calls of functions in them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from reasoner.base_model import StrictModel

MAX_PROBLEM_CHARS = 1 << 24
"""Bound of any text of a job; a service has its own, the setting ``limits.message_chars``."""
MAX_MESSAGES = 10_000
MAX_CALLS = 128
"""Calls of one message."""
MAX_ID_CHARS = 4096
"""Length of the id of a call: some servers keep a signature or a whole address in it."""

Text = Annotated[str, Field(min_length=1, max_length=MAX_PROBLEM_CHARS)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
CallId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class CalledFunction(StrictModel):
    """A function's name, and its arguments as the JSON text of an object."""

    name: FunctionName
    arguments: Annotated[str, Field(max_length=MAX_PROBLEM_CHARS)]


class MessageCall(StrictModel):
    """A call that the assistant made."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def render(self, *, arguments_as_text: bool) -> dict[str, Any]:
        """Return the call for a chat template: its arguments are a value, or text where they are no JSON object."""
        arguments: Any = self.function.arguments or "{}"
        if not arguments_as_text:
            with contextlib.suppress(ValueError):
                value = json.loads(arguments)
                arguments = value if isinstance(value, dict) else arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(StrictModel):
    """A turn. One of the assistant may have calls; one of a tool has the result of the call ``tool_call_id``.

    Only a user's has to say something: a result or an answer may be empty.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, Field(max_length=MAX_PROBLEM_CHARS)] | None = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_CALLS)] = Field(
        default_factory=list, exclude_if=lambda calls: not calls
    )
    tool_call_id: CallId | None = Field(None, exclude_if=lambda call: call is None)

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls: a message of role {self.role!r} calls nothing: they are the assistant's")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id: a message of role 'tool' has one, and no other")
        if self.content is None and self.role != "tool" and not self.tool_calls:
            raise ValueError("content: it is empty: write the text of the message")
        if not self.content and self.role == "user":
            raise ValueError("content: it is empty: give at least 1 character")
        return self

    def render(self, *, arguments_as_text: bool = False) -> dict[str, Any]:
        """Return the message for a chat template, which reads the arguments of calls as values or as text."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.tool_calls:
            message["tool_calls"] = [call.render(arguments_as_text=arguments_as_text) for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def check_results(messages: Sequence[Message]) -> None:
    """Raise ``ValueError`` unless every result follows a call of its id, and every call has its result."""
    waiting: dict[str, int] = {}
    for index, message in enumerate([*messages, None]):
        if message is not None and message.tool_call_id is not None:
            if message.tool_call_id not in waiting:
                known = ", ".join(map(repr, waiting)) or "none"
                raise ValueError(
                    f"messages.{index}.tool_call_id: no call before it has the id {message.tool_call_id!r}; calls "
                    f"without a result are {known}"
                )
            del waiting[message.tool_call_id]
        elif waiting:
            call, place = next(iter(waiting.items()))
            problem = f"the call {call!r} has no result: add a message of role 'tool' with its id"
            raise ValueError(f"messages.{place}.tool_calls: {problem}")
        elif message is not None:
            waiting = {call.id: index for call in message.tool_calls}
