"""Requests to a chat server: the messages of a conversation, and the fields that its kind takes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from engine.protocol.constraint import Constraint
from engine.protocol.types import InvalidRequest, NotSupported, Token
from engine.protocol.wire import Json
from engine.remote.branches.engine import unsupported
from engine.remote.chat.encoding import decode_prompt
from engine.remote.chat.options import ChatOptions
from engine.remote.connection import Connection

EFFORT, TOOLS, CHOICE = "reasoning_effort", "tools", "tool_choice"
"""The variables of chat templates that are fields of OpenAI's requests, too."""
PATH = "/v1/chat/completions"


class ChatRequests:
    """The form of the requests to one server, as far as it is known."""

    def __init__(self, connection: Connection, options: ChatOptions) -> None:
        self.connection = connection
        self.options = options
        self._limit_field = "max_completion_tokens"

    def make_body(self, fields: Json, limit: int) -> Json:
        """Return a body with a limit of new tokens, without the fields that the server refuses."""
        body = {name: value for name, value in fields.items() if name not in self.options.omit}
        return body | {self._limit_field: limit}

    def understands_other_limit(self, error: InvalidRequest) -> bool:
        """Return True once, if the server refuses the newer name of the limit, which older servers do not know."""
        if self._limit_field != "max_completion_tokens" or self._limit_field not in f"{error} {error.field}":
            return False
        self._limit_field = "max_tokens"
        return True

    def make_messages(self, tokens: Sequence[Token]) -> Json:
        """Return the fields that hold the conversation and its template's variables. The thought is left out, unless
        its end was not sent by the server, which goes on there.

        Raises ``EngineError`` if the conversation ends in the middle of an answer and the server has no prefill.
        """
        is_literal = self.options.is_literal
        conversation = decode_prompt(tokens)
        messages: list[Json] = [*conversation.messages]
        fields: Json = {"messages": messages}
        if kwargs := conversation.template_kwargs:
            kwargs = dict(kwargs)
            if TOOLS in kwargs:  # a server that continues texts leaves calls in the text, as its model writes them
                fields |= {TOOLS: kwargs.pop(TOOLS)} | ({CHOICE: "none"} if is_literal else {})
            fields |= {"chat_template_kwargs": kwargs} if is_literal else kwargs
        is_whole = is_literal and conversation.has_open_thought
        answer = conversation.written if is_whole else conversation.answer
        if not answer:
            return fields
        messages.append({"role": "assistant", "content": answer})
        match self.options.prefill:
            case "none":
                raise self.cannot("go on after the beginning of an answer")
            case "prefix":
                messages[-1]["prefix"] = True
            case "continue_final_message":
                fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return fields

    def cannot(self, what: str) -> NotSupported:
        return unsupported(self.connection.url, "chat", what)


def format_response(constraint: Constraint | None) -> Json:
    """Return OpenAI's field that holds an answer to a JSON Schema."""
    if constraint is None:
        return {}
    schema = {"name": "answer", "schema": json.loads(constraint.value), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
