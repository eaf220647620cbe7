"""A judge on a chat server: the likelihood of verdicts after a conversation.

Where the server lists the likeliest tokens, these are their log-probabilities where the verdict stands, which may be
behind a thought. Otherwise it is what the judge writes, which is certain of itself. What cannot be read is no verdict.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.protocol.thoughts import find_thought
from engine.protocol.types import (
    EngineUnavailable,
    InvalidRequest,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    Token,
    Tokens,
)
from engine.protocol.wire import Json
from engine.remote.branches.answer import find_end_reason, read_finish, refusing_other_forms
from engine.remote.chat.content import read_message
from engine.remote.chat.encoding import count_tokens, decode_text, encode_prompt
from engine.remote.chat.requests import PATH, ChatRequests
from engine.remote.chat.verdict import find_verdict
from engine.remote.retries import Retries

VERDICT_TOKENS = 16
THINKING_VERDICT_TOKENS = 4096
"""The same for a model that thinks before it answers."""
_CONTEXT_SHARE = 4
"""Such a verdict takes at most this fraction of the context, as its reciprocal."""
MIN_VERDICT_MASS = 0.05
"""Probability that the verdicts together must have as the first token, where the text itself gives none."""
_UNLIKELY = -30.0
"""Log-probability of a verdict that is not among the likeliest."""
_SCORES_AT_ONCE = 16
_SHOWN_CHARS = 1000
"""Characters of a text without a verdict that are kept."""
_THINKERS: set[tuple[str, str]] = set()
"""Servers and their models that have thought before a verdict."""

Likeliest = Sequence[tuple[str, Mapping[str, float]]]
"""The tokens of an answer, each with the likeliest ones in its place."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """A server's answer to one question, and its cost."""

    thought: str
    text: str
    likeliest: Likeliest
    is_cut: bool
    has_thought: bool
    computed: int
    cached: int


class ChatJudge:
    """Judge on one server."""

    def __init__(self, requests: ChatRequests) -> None:
        self._requests = requests
        self._connection = requests.connection
        self._lists_likeliest = True
        """False once the server has refused to list the likeliest tokens."""
        self._slots = asyncio.Semaphore(_SCORES_AT_ONCE)
        self._unbilled: dict[Tokens, tuple[int, int]] = {}
        """Computed and cached tokens of questions that are asked again with more room."""

    async def judge(self, request: ScoreRequest, index: int, item: ScoreItem) -> ScoreResult:
        """Return the log-probabilities of verdicts after a conversation.

        What the server refuses for this conversation alone, such as one that a filter rejects, has no verdict.
        """
        tokens = tuple(
            token for part in item.parts for token in (encode_prompt(part) if isinstance(part, str) else part)
        )
        verdicts = [decode_text((token,)) for token in request.token_ids]
        key = self._connection.url, request.model
        computed, cached = self._unbilled.pop(tokens, (0, 0))
        while True:
            room = self._choose_max_tokens(key)
            needed = len(tokens) + room
            if request.max_compute is not None and computed + needed > request.max_compute:
                self._unbilled[tokens] = computed, cached
                return ScoreResult(index, None, computed + needed, 0)
            try:
                async with self._slots:
                    answer = await self._ask_verdict(request.model, tokens, room)
            except EngineUnavailable:
                raise
            except InvalidRequest as error:
                if error.field == "model":
                    raise
                return ScoreResult(index, (), computed, cached, unread=str(error))
            computed, cached = computed + answer.computed, cached + answer.cached
            values = _read_values(answer, verdicts)
            if values is not None:
                return ScoreResult(index, (values,), computed, cached)
            if not (answer.has_thought or answer.is_cut) or room >= self._room_to_think:
                return ScoreResult(index, (), computed, cached, unread=answer.text[:_SHOWN_CHARS])
            _THINKERS.add(key)

    @property
    def _room_to_think(self) -> int:
        options = self._requests.options
        return options.verdict_tokens or min(THINKING_VERDICT_TOKENS, options.context // _CONTEXT_SHARE)

    def _choose_max_tokens(self, key: tuple[str, str]) -> int:
        """Return the number of tokens that a verdict may have: the configured one, or what the model needs."""
        return self._room_to_think if self._requests.options.verdict_tokens or key in _THINKERS else VERDICT_TOKENS

    async def _ask_verdict(self, model: str, tokens: Sequence[Token], room: int) -> _Answer:
        """Ask for a verdict, again after passing failures. Raises ``EngineError``."""
        fields = self._requests.make_messages(tokens) | {"model": model, "temperature": 0.0}

        async def ask() -> _Answer:
            more = {"logprobs": True, "top_logprobs": 20} if self._lists_likeliest else {}
            try:
                body = self._requests.make_body(fields | more, room)
                answer: Json = await self._connection.call("POST", PATH, body)
            except InvalidRequest as error:
                if self._lists_likeliest and "logprobs" in f"{error} {error.field}":
                    self._lists_likeliest = False
                elif "temperature" in fields and "temperature" in f"{error} {error.field}":
                    del fields["temperature"]  # models that think have one of their own
                elif not self._requests.understands_other_limit(error):
                    raise
                return await ask()
            return self._read_answer(answer, tokens)

        return await Retries.of_requests(should_wait=self._connection.should_wait).call(ask)

    def _read_answer(self, answer: Json, tokens: Sequence[Token]) -> _Answer:
        source = self._connection.source
        with refusing_other_forms(source):
            choice = answer["choices"][0]
            thought, text = read_message(choice["message"], source)
            usage = answer.get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            reported_thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
            computed = (usage.get("prompt_tokens") or len(tokens)) - cached
            computed += count_tokens(thought + text, usage.get("completion_tokens"))
            is_cut = find_end_reason(read_finish(choice) or "stop") == "length"
            likeliest = _read_likeliest(choice.get("logprobs") or {})
        has_thought = bool(thought or reported_thought or find_thought(text))
        return _Answer(
            thought,
            text.strip(),
            likeliest=likeliest,
            is_cut=is_cut,
            has_thought=has_thought,
            computed=computed,
            cached=cached,
        )


def _read_likeliest(logprobs: Json) -> Likeliest:
    return [
        (str(token["token"]), {str(top["token"]): float(top["logprob"]) for top in token.get("top_logprobs") or ()})
        for token in logprobs.get("content") or ()
    ]


def _read_values(answer: _Answer, verdicts: Sequence[str]) -> tuple[float, ...] | None:
    """Return the log-probabilities of the verdicts; ``None`` if the answer gives none."""
    found = None if answer.is_cut and not answer.text else find_verdict(answer.text, verdicts)
    places = [top for token, top in answer.likeliest if found and _is_word(token, verdicts[found.index])]
    if found is not None and places:
        values = _weigh(places[0 if found.is_first and not answer.has_thought else -1], verdicts)
        if max(values) > _UNLIKELY:
            return values
    if found is not None:
        return tuple(0.0 if index == found.index else _UNLIKELY for index in range(len(verdicts)))
    if not answer.likeliest or answer.has_thought:
        return None
    values = _weigh(answer.likeliest[0][1], verdicts)
    return values if math.fsum(map(math.exp, values)) >= MIN_VERDICT_MASS else None


def _weigh(likeliest: Mapping[str, float], verdicts: Sequence[str]) -> tuple[float, ...]:
    """Return the log-probability of each verdict: that of all tokens that are the word, in any case and markup."""
    values = []
    for verdict in verdicts:
        mass = math.fsum(math.exp(value) for token, value in likeliest.items() if _is_word(token, verdict))
        values.append(math.log(mass) if mass > 0 else _UNLIKELY)
    return tuple(values)


def _is_word(token: str, verdict: str) -> bool:
    return token.strip().strip("*_`\"'.,:;!#{}()[]\u2581\u0120").casefold() == verdict.strip().casefold()
