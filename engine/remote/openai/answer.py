"""The part of a branch that an OpenAI-compatible server has sent so far."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.protocol.types import Branch, EngineError, TokenIds, TokenLogprob
from engine.protocol.wire import Json
from engine.remote.branches.answer import Answer, read_finish

_END_OF_TURN = re.compile(
    r"(<\|(im_end|eot_id|eom_id|end_of_text|endoftext|return|call)\|>|</s>|<\uff5cend\u2581of\u2581sentence\uff5c>)$"
)
"""The texts of public models' end-of-sequence tokens."""


@dataclass
class TextAnswer(Answer):
    """The answer of a server that completes texts, and may name their tokens."""

    stops: tuple[str, ...] = ()
    """The request's stop strings."""
    text: str = ""
    ids: list[int] = field(default_factory=list)
    num_kept: int = 0
    """The number of ids from requests before this one."""
    logprob: float | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    untokenized: str = ""
    """The last part of the text, for which the server sent no token ids."""
    accepted: int = 0
    rejected: int = 0

    @property
    def token_ids(self) -> TokenIds:
        return tuple(self.ids)

    @property
    def num_left(self) -> int:
        return self.branch.max_tokens - len(self.ids)

    @property
    def rest(self) -> Branch:
        """The branch that continues after what has arrived."""
        return replace(self.branch, generated=self.branch.generated + self.token_ids, max_tokens=self.num_left)

    def _take_choice(self, choice: Json, source: str) -> str:  # noqa: ARG002
        text: str = choice.get("text") or ""
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs") or {}
        if ids is None:
            self.untokenized += text
        self.ids += ids or ()
        if len(self.ids) > self.branch.max_tokens:
            raise EngineError(
                f"the server sent {len(self.ids)} tokens where at most {self.branch.max_tokens} were asked for"
            )
        values = logprobs.get("token_logprobs")
        if values is not None:
            self.logprob = (self.logprob or 0.0) + math.fsum(value for value in values if value is not None)
        self._take_logprobs(ids or (), logprobs)
        finish = read_finish(choice)
        if finish is not None:
            self._end(finish)
            text = self._find_stop(choice, text)
        self.text += text
        return text

    def _find_stop(self, choice: Json, text: str) -> str:
        """Record what has stopped the branch, and return its last text as it stands in the branch."""
        self.stop = choice.get("stop_reason", choice.get("matched_stop"))
        if self.stop is None and self.reason == "stop":
            whole = self.text + text
            self.stop = next((stop for stop in self.stops if whole.endswith(stop)), None)
            if self.stop is None and choice.get("token_ids"):
                self.stop = self.ids[-1]  # vLLM does not name the model's own end of a sequence
        if isinstance(self.stop, int):  # where special tokens are shown, so is the one that ends the turn
            text = _END_OF_TURN.sub("", text)
        if self.stop in self.stops:
            text += _rest_of_last_token(self.text + text, (choice.get("logprobs") or {}).get("tokens") or ())
        return text

    def _take_usage(self, usage: Json) -> None:
        self.cached = max(self.cached, (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        details = usage.get("completion_tokens_details") or {}
        self.accepted += details.get("accepted_prediction_tokens") or 0
        self.rejected += details.get("rejected_prediction_tokens") or 0

    def _take_logprobs(self, ids: TokenIds, logprobs: Json) -> None:
        """Add the likeliest tokens of a server that names tokens by their ids."""
        for token, value, likeliest in zip(
            ids, logprobs.get("token_logprobs") or (), logprobs.get("top_logprobs") or (), strict=False
        ):
            pairs = [(_token_id(name), each) for name, each in (likeliest or {}).items()]
            top = tuple(sorted(((id, each) for id, each in pairs if id is not None), key=lambda pair: -pair[1]))
            self.logprobs.append(TokenLogprob(token, value, top))


def _token_id(name: str) -> int | None:
    prefix, _, number = name.partition(":")
    return int(number) if prefix == "token_id" and number.isdigit() else None


def _rest_of_last_token(text: str, tokens: Sequence[str]) -> str:
    """Return what the last token holds after a stop string, where the server cut the text but not its tokens."""
    last = tokens[-1] if tokens else ""
    held = next((length for length in range(len(last), 0, -1) if text.endswith(last[:length])), len(last))
    return last[held:]
