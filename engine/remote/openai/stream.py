"""A request for completions of a text: siblings with the same tokens so far."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.protocol.types import Completion, EngineError, FinishReason, InvalidRequest, TokenizeRequest
from engine.protocol.wire import Json
from engine.remote.branches.running import RunningRequest
from engine.remote.branches.stream import BranchStream
from engine.remote.health import warn_once
from engine.remote.openai.answer import TextAnswer
from engine.remote.openai.request import CompletionRequests

_CACHE_IS_UNCOUNTED = (
    "the vLLM at {} does not report cached tokens, so prompts are billed as if it had computed them all: start it with "
    "--enable-prompt-tokens-details"
)


class CompletionStream(BranchStream[TextAnswer]):
    """Request to ``/v1/completions``.

    A branch whose stream breaks off continues after what has arrived. One with frequency or presence penalty begins
    again, since these servers count the tokens of one request alone.
    """

    path = "/v1/completions"

    def __init__(
        self, requests: CompletionRequests, running: RunningRequest, answers: Sequence[TextAnswer], *, is_watched: bool
    ) -> None:
        super().__init__(requests.connection, running, answers)
        self._requests = requests
        self._is_watched = is_watched

    def build_body(self) -> Json:
        rests = [answer.rest for answer in self.answers]
        return self._requests.make_body(self.request, rests, is_watched=self._is_watched)

    def read_usage(self, answer: TextAnswer, usage: Json) -> None:
        super().read_usage(answer, usage)
        if self._requests.dialect.name == "vllm" and usage.get("prompt_tokens_details") is None:
            warn_once(_CACHE_IS_UNCOUNTED.format(self.connection.url))

    async def find_tokens(self, answer: TextAnswer) -> None:
        if answer.untokenized:
            request = TokenizeRequest(self.request.model, answer.untokenized, special=False)
            answer.ids += await self._requests.tokenize(request)
            answer.untokenized = ""

    async def salvage(self) -> bool:
        if self.request.sampling.counts_tokens:
            self.answers = [self._requests.begin_answer(self.request, answer.index) for answer in self.answers]
            return False
        has_progress = False
        for answer in self.answers:
            await self.find_tokens(answer)
            has_progress |= len(answer.ids) > answer.num_kept
            answer.num_kept = len(answer.ids)
        return has_progress

    def judge(self, error: EngineError) -> tuple[FinishReason | None, EngineError]:
        if not isinstance(error, InvalidRequest):
            return None, error
        count = len(self.request.sampling.stop)
        if count <= 4 or "body.stop" not in str(error):
            return "refused", error
        return "refused", InvalidRequest(
            f"the vLLM at {self.connection.url} takes fewer than {count} stop strings: start it with "
            f"VLLM_MAX_STOP_STRINGS={count}, or choose 'steps' with fewer of them (two for a separator, two for each "
            "word of markers, nine for sentences), or fewer strings in 'stop'",
            "steps",
        )

    def complete(self, answer: TextAnswer, reason: FinishReason) -> Completion:
        logprob = answer.logprob
        if logprob is None:  # not reported: all tokens get the same
            logprob = -len(answer.ids) * math.log(max(self._requests.vocab_size, 2))
        return Completion(
            index=answer.index,
            token_ids=answer.token_ids,
            text=answer.text,
            finish_reason=reason,
            stop=answer.stop,
            logprob=logprob,
            prompt_tokens=len(self.request.prompt) + len(answer.branch.generated),
            cached_tokens=answer.cached,
            logprobs=None if self.request.sampling.logprobs is None else tuple(answer.logprobs),
            drafted_tokens=answer.accepted + answer.rejected,
            accepted_tokens=answer.accepted,
            refusal=answer.refusal,
        )
