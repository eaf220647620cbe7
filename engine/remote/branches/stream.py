"""A request to a server for branches of one prompt: its stream, its retries and its end."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import aclosing
from typing import ClassVar, Generic, TypeVar

from engine.protocol.request_checks import make_refusal
from engine.protocol.streams import merge_streams
from engine.protocol.types import Branch, Completion, Delta, EngineError, EngineUnavailable, Events, FinishReason
from engine.protocol.wire import Json
from engine.remote.branches.answer import Answer, read_choices
from engine.remote.branches.running import RunningRequest
from engine.remote.connection import Connection
from engine.remote.retries import Retries

_SEED_BITS = 31
"""Seeds that every server accepts."""

AnswerT = TypeVar("AnswerT", bound=Answer)


class BranchStream(ABC, Generic[AnswerT]):
    """The branches of a generate request that a server computes in one request: a single one, or siblings.

    A protocol says how the request looks (``build_body``), and its answers read what comes (``Answer.take``).
    """

    path: ClassVar[str]

    def __init__(self, connection: Connection, running: RunningRequest, answers: Sequence[AnswerT]) -> None:
        """``answers``: of branches that have the same tokens so far, in the order of the samples."""
        self.connection = connection
        self.running = running
        self.request = running.request
        self.answers = list(answers)
        """The answers of branches that have not been completed."""

    @abstractmethod
    def build_body(self) -> Json:
        """Return the body of the request for what is missing. Raises ``EngineError`` if the server cannot do that."""

    @abstractmethod
    def complete(self, answer: AnswerT, reason: FinishReason) -> Completion:
        """Return the end of a branch."""

    def read_usage(self, answer: AnswerT, usage: Json) -> None:
        """Add what the server reports about the request to the answer of its last branch."""
        answer.take_usage(usage, self.connection.source)

    async def find_tokens(self, answer: AnswerT) -> None:
        """Add the token ids that the server has not reported."""

    @abstractmethod
    async def salvage(self) -> bool:
        """Prepare for another attempt after a broken stream. Return True if it goes on after text that has arrived."""

    def go_on(self, *, has_progress: bool) -> None:
        """Decide what is kept of the answers, before the next attempt. ``has_progress``: what ``salvage`` returned."""

    def can_rephrase(self, error: EngineError) -> bool:  # noqa: ARG002
        """Return True if the same request in other words may be accepted, and use these from now on."""
        return False

    @abstractmethod
    def judge(self, error: EngineError) -> tuple[FinishReason | None, EngineError]:
        """Return the reason with which a refusal ends the branches, and its words.

        ``None`` for a refusal that all branches of the caller's request would meet.
        """

    async def run(self) -> Events:
        """Yield the events of the branches. A stream that breaks off goes on after what has arrived, if it can.

        If that fails for good, what has arrived is yielded, so that no other branch is lost.
        """
        retries = Retries.of_requests(should_wait=self.connection.should_wait)
        while True:
            try:
                async with aclosing(self._receive()) as events:
                    async for event in events:
                        yield event
                return
            except EngineUnavailable as error:
                for completion in await self._complete_ended():
                    yield completion
                if not self.answers:
                    return
                has_progress = await self.salvage()
                if not await self.running.wait_to_retry(error, retries, has_progress=has_progress):
                    break
                self.go_on(has_progress=has_progress)
                if len(self.answers) > 1 and has_progress:  # their prompts differ now
                    streams = [self._split_off(answer).run() for answer in self.answers]
                    async with aclosing(merge_streams(streams, 0)) as events:
                        async for event in events:
                            yield event
                    return
            except EngineError as error:
                if self.can_rephrase(error):
                    continue
                for completion in await self._complete_ended():
                    yield completion
                reason, words = self.judge(error)
                if reason is None:
                    self.running.fail(words)
                    break
                for completion in self._refuse(reason, words):
                    yield completion
                return
        for answer in self.answers:
            if answer.token_ids or self.running.failure is None:
                yield self.complete(answer, self.running.end_reason)

    async def _receive(self) -> Events:
        """Yield the events of one request."""
        if self.answers[0].num_left < 1:  # all was received before the stream broke off
            for answer in self.answers:
                yield self.complete(answer, "length")
            return
        source, headers = self.connection.source, routing_headers(self.request.request_id, self.request.pin_key)
        left, other_fields = dict(enumerate(self.answers)), set[str]()
        is_single = len(left) == 1
        stream = self.connection.events(self.path, self.build_body(), headers, counts_keep_alives=False)
        async with aclosing(stream) as chunks:
            try:
                while (chunk := await self.running.next(chunks)) is not None:
                    choices = read_choices(chunk, source)
                    if not choices:
                        other_fields.update(chunk)
                    for choice in choices[:1] if is_single else choices:
                        # Gateways number the only sample as they like.
                        index = 0 if is_single else choice.get("index", 0)
                        if index not in left:
                            raise EngineError(f"the server sent a sample with the index {index}")
                        answer = left[index]
                        # Token ids are sent once, at the end: servers split texts and tokens at different places.
                        if text := answer.take(choice, source):
                            yield Delta(answer.index, text, ())
                        if answer.reason is not None and len(left) > 1:  # the usage of all comes with the last one
                            del left[index]
                            yield await self._complete(self._without_prompt(answer))
                    if len(left) == 1 and chunk.get("usage"):
                        for answer in left.values():
                            self.read_usage(answer, chunk["usage"])
            except TimeoutError:
                for answer in left.values():
                    answer.reason = answer.reason or self.running.end_reason
        for answer in left.values():
            answer.check_end(source, other_fields)
            yield await self._complete(answer)

    def _without_prompt(self, answer: AnswerT) -> AnswerT:
        """Return the answer of a sibling, with the prompt as cached: it is computed once, and the last one's."""
        answer.cached = len(self.request.prompt) + len(answer.branch.generated) - 1
        return answer

    async def _complete_ended(self) -> list[Completion]:
        """Return the completions of branches that the server has ended, though its stream broke off later."""
        return [await self._complete(answer) for answer in list(self.answers) if answer.reason is not None]

    async def _complete(self, answer: AnswerT) -> Completion:
        await self.find_tokens(answer)
        self.answers = [other for other in self.answers if other is not answer]
        assert answer.reason is not None
        return self.complete(answer, answer.reason)

    def _refuse(self, reason: FinishReason, error: EngineError) -> list[Completion]:
        """Return the ends of branches that the server does not go on with, which may say nothing about others."""
        if reason == "refused":
            self.running.refuse(error)
            for answer in self.answers:
                answer.refusal = make_refusal(error)
        return [self.complete(answer, reason) for answer in self.answers]

    def _split_off(self, answer: AnswerT) -> BranchStream[AnswerT]:
        """Return a stream of one of the branches alone."""
        stream = copy.copy(self)
        stream.answers = [answer]
        return stream


def branch_seed(branch: Branch) -> int:
    """Return a seed of 31 bits, from a branch's seed, key and number of generated tokens.

    The number is included because servers count noise from the start of a request: a continuation must not repeat the
    noise of its beginning. The seeds of siblings, which have ``Branch.sibling``, are consecutive.
    """
    key, index = (branch.key, 0) if branch.sibling is None else branch.sibling
    words = f"{branch.seed}/{key}/{len(branch.generated)}"
    first = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest(), "little") >> 1
    return (first + index) % (1 << _SEED_BITS)


def routing_headers(request_id: str, pin_key: str | None) -> dict[str, str]:
    """Return headers for the server's log, and for routers that send a session's requests to one replica.

    vLLM's routers read ``X-Session-ID``, SGLang's ``X-SMG-Routing-Key``.
    """
    session = {} if pin_key is None else {"X-Session-ID": pin_key, "X-SMG-Routing-Key": pin_key}
    return {"X-Request-Id": request_id} | session
