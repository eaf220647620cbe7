"""The conversation of a request for the model: messages of one role are one turn, a result is a turn of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby

from api.anthropic.content import (
    Block,
    InputMessage,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
    join_texts,
)
from api.conversation.sent_fields import Turn, naming_field, refuse_field
from api.conversation.thoughts import strip_thoughts
from reasoner.jobs.messages import CalledFunction, Message, MessageCall

Entry = tuple[str, Block]
"""A block, and its field in the request."""


def read_turns(system: Sequence[TextBlock], messages: Sequence[InputMessage]) -> list[Turn]:
    """Return the turns for the model.

    Raises ``Problem`` or ``RequestValidationError`` that names the block of which no turn can be made.
    """
    text = join_texts(list(system))
    turns = [Turn("system", Message(role="system", content=text))] if text else []
    calls: dict[str, str] = {}
    """Fields of the calls of the turn before, by their ids."""
    for role, group in groupby(enumerate(messages), key=lambda item: item[1].role):
        numbered = list(group)
        path = f"messages.{numbered[0][0]}"
        entries = [
            (f"messages.{index}.content.{place}", block)
            for index, message in numbered
            for place, block in enumerate(message.content)
        ]
        with naming_field(path):
            if role == "user":
                turns += _read_user_turns(path, entries, calls)
                calls = {}
                continue
            _check_answered(calls)
            calls = {block.id: field for field, block in entries if isinstance(block, ToolUseBlock)}
            turns.append(_read_assistant_turn(path, entries) if role == "assistant" else _read_text_turn(path, entries))
    _check_answered(calls)
    if messages[-1].role == "assistant":
        raise refuse_field(
            f"messages.{len(messages) - 1}",
            "the last message is the assistant's, and answers do not continue it: end with a message of the user",
        )
    return turns


def _read_user_turns(path: str, entries: Sequence[Entry], calls: dict[str, str]) -> Iterator[Turn]:
    """Yield a turn for each result of ``calls``, then one for the texts."""
    texts: list[TextBlock] = []
    waiting = dict(calls)
    for field, block in entries:
        match block:
            case ToolResultBlock():
                if texts:
                    raise refuse_field(field, "results come before texts: put the tool_result blocks first")
                if waiting.pop(block.tool_use_id, None) is None:
                    known = ", ".join(map(repr, waiting)) or "none"
                    raise refuse_field(
                        f"{field}.tool_use_id",
                        f"no tool_use of the message before has the id {block.tool_use_id!r}; those without a result "
                        f"are {known}",
                    )
                content = _read_result(block)
                yield Turn(field, Message(role="tool", content=content, tool_call_id=block.tool_use_id))
            case TextBlock():
                texts.append(block)
            case _:
                raise refuse_field(field, f"{block.type} blocks are the assistant's")
    _check_answered(waiting)
    if texts or not entries or not calls:
        yield Turn(path, Message(role="user", content=join_texts(texts)))


def _read_result(block: ToolResultBlock) -> str:
    text = join_texts(block.content)
    if not block.is_error or text.lstrip().lower().startswith("error"):
        return text
    return f"Error: {text}"


def _read_assistant_turn(path: str, entries: Sequence[Entry]) -> Turn:
    """Return the turn of texts and calls; thoughts are left out."""
    texts, calls = [], []
    for field, block in entries:
        match block:
            case TextBlock():
                texts.append(block)
            case ToolUseBlock():
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(MessageCall(id=block.id, function=CalledFunction(name=block.name, arguments=arguments)))
            case ToolResultBlock():
                raise refuse_field(field, "results of tools are the user's: put them into the next message")
    return Turn(path, Message(role="assistant", content=strip_thoughts(join_texts(texts)), tool_calls=calls))


def _read_text_turn(path: str, entries: Sequence[Entry]) -> Turn:
    """Return the turn of a system message within the conversation."""
    for field, block in entries:
        if not isinstance(block, TextBlock):
            raise refuse_field(field, "a system message has text blocks alone")
    return Turn(path, Message(role="system", content=join_texts([b for _, b in entries if isinstance(b, TextBlock)])))


def _check_answered(calls: dict[str, str]) -> None:
    """Raise ``Problem`` if a call has no result."""
    for call, field in calls.items():
        raise refuse_field(
            field, f"the call {call!r} has no result: begin the next message with a tool_result block of its id"
        )
