"""A request for the next message of a conversation: one branch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.protocol.request_checks import PromptTooLong
from engine.protocol.thoughts import find_thought
from engine.protocol.types import Completion, EngineError, FinishReason, GenerateRequest, InvalidRequest, Token
from engine.protocol.wire import Json
from engine.remote.branches.running import RunningRequest
from engine.remote.branches.stream import BranchStream, branch_seed
from engine.remote.chat.answer import ChatAnswer
from engine.remote.chat.encoding import decode_prompt, decode_text, measure_thought
from engine.remote.chat.model_list import ModelList
from engine.remote.chat.options import SETTINGS, ChatOptions
from engine.remote.chat.requests import PATH, ChatRequests, format_response

_TOO_LONG = re.compile(
    r"context[ _](length|window|size)|(prompt|input|request) is too (long|large)|too many tokens"
    r"|maximum (number of tokens|allowed number of)|exceeds? .{0,40}(context|token limit)",
    re.IGNORECASE,
)
"""Words with which OpenAI, vLLM, llama.cpp, Anthropic and others refuse a conversation that exceeds the context."""


class ChatStream(BranchStream[ChatAnswer]):
    """Request to ``/v1/chat/completions``.

    A stream that breaks off is continued, or begins again where the server cannot go on after the beginning of an
    answer.
    """

    path = PATH

    def __init__(self, requests: ChatRequests, models: ModelList, running: RunningRequest, index: int) -> None:
        """``models``: forgotten when the server fails. ``index``: of the branch in the caller's request."""
        super().__init__(requests.connection, running, [_begin_answer(running.request, index, requests.options)])
        self._requests = requests
        self._options = requests.options
        self._models = models

    def build_body(self) -> Json:
        request, [answer] = self.request, self.answers
        fields = self._requests.make_messages([*request.prompt, *answer.branch.generated, *answer.earlier]) | {
            "model": request.model,
            "seed": branch_seed(answer.branch),
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: getattr(request.sampling, name) for name in SETTINGS if name != "stop" or request.sampling.stop},
            **format_response(request.constraint),
        }
        if request.thinking_limit is not None:
            fields |= self._options.limit_thought(request.thinking_limit, answer.num_left)
        return self._requests.make_body(fields, answer.num_left)

    async def salvage(self) -> bool:
        self._models.forget()
        return self._can_go_on and any(answer.split()[1] for answer in self.answers)

    def go_on(self, *, has_progress: bool) -> None:
        for answer in self.answers:
            if has_progress or (self._can_go_on and answer.has_begun):
                answer.keep()
            else:
                answer.drop()

    def can_rephrase(self, error: EngineError) -> bool:
        has_begun = any(answer.num_events for answer in self.answers)
        return isinstance(error, InvalidRequest) and not has_begun and self._requests.understands_other_limit(error)

    def judge(self, error: EngineError) -> tuple[FinishReason | None, EngineError]:
        if not isinstance(error, InvalidRequest) or _TOO_LONG.search(str(error)) is None:
            return "refused", error
        if _has_answers(self.request.prompt):
            return "context", error
        return "refused", PromptTooLong(str(error), error.field)

    def complete(self, answer: ChatAnswer, reason: FinishReason) -> Completion:
        tokens = answer.token_ids
        return Completion(
            index=answer.index,
            token_ids=tokens,
            text=decode_text(tokens),
            finish_reason=reason,
            stop=answer.stop,
            logprob=0.0,
            prompt_tokens=answer.prompt or len(self.request.prompt) + len(answer.branch.generated),
            cached_tokens=answer.cached,
            thought=measure_thought(tokens),
            refusal=answer.refusal,
        )

    @property
    def _can_go_on(self) -> bool:
        """True if another request can go on after a given beginning of an answer."""
        return self._options.prefill != "none" and not self.request.sampling.counts_tokens


def _begin_answer(request: GenerateRequest, index: int, options: ChatOptions) -> ChatAnswer:
    """Return the answer of a branch of which nothing has arrived."""
    branch, is_literal = request.branches[index], options.is_literal
    conversation = decode_prompt([*request.prompt, *branch.generated])
    is_in_thought = is_literal and conversation.has_open_thought and find_thought(conversation.answer) is None
    has_begun = bool(conversation.answer) and not is_in_thought
    return ChatAnswer(index, branch, has_begun=has_begun, is_in_thought=is_in_thought, is_literal=is_literal)


def _has_answers(prompt: Sequence[Token]) -> bool:
    """Return True for a conversation that has grown by the model's own answers, not only by its user's question."""
    return any(message["role"] == "assistant" for message in decode_prompt(prompt).messages)
