"""State for continuing a generate request on another replica without streaming anything twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from engine.protocol.types import Completion, Delta, EngineUnavailable, GenerateRequest, Token

_MIN_TIMEOUT_SECONDS = 0.001


class OutputMismatch(EngineUnavailable):
    """Another replica computed something else than the streamed beginning of a branch, because it rounds otherwise.

    The job starts again.
    """


@dataclass(slots=True)
class StreamedPrefix:
    """The part of a branch that was streamed to the client."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[Token] = field(default_factory=list)
    num_chars_to_skip: int = 0
    num_tokens_to_skip: int = 0
    """The parts of the following deltas that were streamed before."""

    def restart(self) -> None:
        """Prepare for another replica that generates the branch from its beginning."""
        self.num_chars_to_skip, self.num_tokens_to_skip = sum(map(len, self.texts)), len(self.token_ids)

    def drop_streamed(self, event: Completion | Delta) -> Completion | Delta | None:
        """Return the event without what was streamed before; ``None`` if nothing is left. Raises ``OutputMismatch``."""
        if isinstance(event, Completion):
            streamed = tuple(self.token_ids)
            if not event.text.startswith("".join(self.texts)) or event.token_ids[: len(streamed)] != streamed:
                raise OutputMismatch("another engine ended a branch otherwise than its beginning had been streamed")
            return event
        text, token_ids = event.text[self.num_chars_to_skip :], event.token_ids[self.num_tokens_to_skip :]
        logprobs = None if event.logprobs is None else event.logprobs[self.num_tokens_to_skip :]
        self.num_chars_to_skip = max(0, self.num_chars_to_skip - len(event.text))
        self.num_tokens_to_skip = max(0, self.num_tokens_to_skip - len(event.token_ids))
        self.texts.append(text)
        self.token_ids += token_ids
        return replace(event, text=text, token_ids=token_ids, logprobs=logprobs) if text or token_ids else None

    def to_cancelled(self, index: int) -> Completion:
        """Return the completion of an aborted branch whose replica was lost: what was streamed, without statistics."""
        return Completion(
            index,
            tuple(self.token_ids),
            text="".join(self.texts),
            finish_reason="cancelled",
            stop=None,
            logprob=0.0,
            prompt_tokens=0,
            cached_tokens=0,
        )


def remaining_request(request: GenerateRequest, missing: Sequence[int], elapsed_seconds: float) -> GenerateRequest:
    """Return the request for the missing branches, within the rest of its time."""
    sampling = request.sampling
    if 0 not in missing and sampling.prompt_logprobs is not None:  # they came with the first branch
        sampling = replace(sampling, prompt_logprobs=None)
    timeout = None if request.timeout is None else max(_MIN_TIMEOUT_SECONDS, request.timeout - elapsed_seconds)
    branches = tuple(request.branches[index] for index in missing)
    return replace(request, branches=branches, sampling=sampling, timeout=timeout)


def choose_by_rendezvous(names: Iterable[str], key: str) -> str:
    """Return the name with the highest hash for a key. Adding or removing another name does not change the choice."""
    return max(names, key=lambda name: blake2b(f"{name}\n{key}".encode(), digest_size=16).digest())
