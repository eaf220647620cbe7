"""The part of an answer that a chat server has sent so far.

The thought of a model that thinks comes first, between delimiters. Servers send it in a field of its own, or with its
delimiters in the content, where a chat template may have written the opening one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from engine.protocol.thoughts import find_thought
from engine.protocol.types import Tokens
from engine.protocol.wire import Json
from engine.remote.branches.answer import Answer, read_finish
from engine.remote.chat.content import read_message
from engine.remote.chat.encoding import CLOSING, OPENING, encode_answer, encode_text, measure_thought

_CALL_END = "}\n</tool_call>"


@dataclass
class ChatAnswer(Answer):
    """The answer of a server that only chats."""

    thought: str = ""
    """The thought that this request has sent apart from the content, with its delimiters."""
    content: str = ""
    has_begun: bool = False
    """True if the request goes on after the beginning of an answer, which no thought follows."""
    is_in_thought: bool = False
    """True if the request goes on in the middle of a thought."""
    is_literal: bool = False
    """True if the server goes on where the text ends, so that all it sends after the beginning of an answer is content,
    also what it takes for a thought."""
    earlier: Tokens = ()
    """The tokens of requests before this one, which were cut."""
    calls: int = 0
    """Number of function calls that this request has begun."""
    num_events: int = 0
    """The number of parts that this request has sent, of text or of hidden reasoning."""
    reported: int | None = None
    reported_thought: int | None = None
    prompt: int = 0

    @property
    def num_left(self) -> int:
        return self.branch.max_tokens - len(self.earlier)

    def _take_choice(self, choice: Json, source: str) -> str:
        delta = choice.get("delta") or choice.get("message") or {}
        reasoning, content = read_message(delta, source)
        self.num_events += bool(reasoning or content)
        text = self._add_reasoning(reasoning) + self._add_content(content)
        for call in delta.get("tool_calls") or ():
            self.num_events += 1
            text += self._add_content(self._write_call(call))
        finish = read_finish(choice) or ("stop" if "message" in choice else None)
        if finish is not None:
            text += self._end_text(finish, choice)
        return text

    def _take_usage(self, usage: Json) -> None:
        if isinstance(usage.get("completion_tokens"), int):
            self.reported = usage["completion_tokens"]
            self.prompt = usage.get("prompt_tokens") or self.prompt
        details = usage.get("completion_tokens_details") or {}
        self.reported_thought = details.get("reasoning_tokens") or self.reported_thought
        self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or self.cached

    def _end_text(self, finish: str, choice: Json) -> str:
        """Record the end of the answer, and return the text that belongs to it."""
        self._end(finish)
        text = self._add_content(_CALL_END) if self.calls else ""
        stop = choice.get("stop_reason", choice.get("matched_stop"))
        if isinstance(stop, str) and self.reason == "stop":  # the server has cut it off
            self.stop = stop
            is_thought = bool(self.thought) and not self.content
            text += self._add_reasoning(stop) if is_thought else self._add_content(stop)
        return text

    def _write_call(self, call: Json) -> str:
        """Return a part of a function call as text in Hermes's format: with its name first, then arguments."""
        function = call.get("function") or {}
        text = ""
        if function.get("name"):
            begun = _CALL_END if self.calls else ""
            self.calls += 1
            text = f'{begun}\n<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": '
        return text + (function.get("arguments") or "")

    def _add_reasoning(self, text: str) -> str:
        """Add text of a thought, and return it as it stands in the branch."""
        if not text:
            return ""
        if self.has_begun or self.content:
            return self._add_content(text) if self.is_literal else ""
        if not self.thought and not self.is_in_thought:
            text = f"{OPENING}\n{text}"
        self.thought += text
        return text

    def _add_content(self, text: str) -> str:
        """Add content, and return it as it stands in the branch: the first closes a thought."""
        if not self.thought or self.content:
            self.content += text
            return text
        text = text.lstrip("\n")
        if not text:
            return ""
        end = f"\n{CLOSING}\n\n"
        self.thought += end
        self.content = text
        return end + text

    def split(self) -> tuple[str, str]:
        """Return the thought that this request has sent and the content after it."""
        if self.thought or self.has_begun:
            return self.thought, self.content
        thought = find_thought(self.content, is_open=self.is_in_thought)
        content = "" if thought is None else self.content[thought.end :].lstrip("\n")
        return ("", self.content) if thought is None else (self.content[: len(self.content) - len(content)], content)

    @property
    def token_ids(self) -> Tokens:
        """The tokens of the branch: those that the server bills, also for hidden reasoning.

        Without a report, since the stream was cut, each event counts as a token.
        """
        count = self.num_events if self.reported is None else self.reported
        return self.earlier + encode_answer(*self.split(), count or None, self.reported_thought)

    def keep(self) -> None:
        """Keep what has arrived as the beginning of the answer, which another request continues."""
        self._begin_again(self.token_ids)
        self.has_begun = True

    def drop(self) -> None:
        """Forget the text that has arrived, since no request can continue it; its tokens stay on the bill."""
        tokens = self.token_ids
        _, num_thought = measure_thought(tokens)
        dropped = encode_text("", num_thought, is_thought=True) + encode_text("", len(tokens) - num_thought)
        self._begin_again(dropped)

    def _begin_again(self, earlier: Tokens) -> None:
        self.earlier, self.thought, self.content, self.num_events, self.calls = earlier, "", "", 0, 0
        self.reported = self.reported_thought = None
