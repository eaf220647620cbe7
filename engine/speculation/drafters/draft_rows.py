"""Branches in a draft model, and their drafts in progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.scheduler.draft import Draft
from engine.scheduler.sequence import Sequence
from engine.speculation.drafter import DraftRequest


@dataclass(eq=False, slots=True, kw_only=True)
class DraftRow(Sequence):
    """A branch in the draft model: its tokens, then the tokens drafted last."""

    num_own: int
    """Number of the branch's own tokens."""

    def follow(self, tokens: list[int]) -> None:
        """Set the branch's own tokens. Accepted draft tokens stay computed."""
        num_own, new = self.num_own, tokens[self.num_own :]
        right = num_own
        for draft_token, token in zip(self.tokens[num_own:], new, strict=False):
            if draft_token != token:
                break
            right += 1
        # The last token is always computed again: the first draft token comes from it.
        self.num_computed = min(self.num_computed, right, len(tokens) - 1)
        self.tokens[num_own:] = new
        self.num_own = len(tokens)


class ReadyRow(NamedTuple):
    """A branch that is in step after the scheduled work."""

    row: DraftRow
    request: DraftRequest
    depth: int
    """Maximum depth."""
    width: int
    """Maximum number of draft tokens per level: 1 for a chain."""


@dataclass(slots=True)
class DraftInProgress:
    """A branch's draft in progress."""

    ready: ReadyRow
    place: int
    """Index among the ready branches."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the chain."""
    probs: list[float] = field(default_factory=list)
    beside: list[tuple[float, int, int, float]] = field(default_factory=list)
    """Runners-up: the probability that the chain before it and the token itself are accepted, the chain's length before
    it, the token, and its own probability."""
    prob: float = 1.0
    """Probability that the whole chain is accepted."""

    def add(self, tokens: list[int], probs: list[float]) -> bool:
        """Append the best token to the chain; return True if the chain continues."""
        # A probability is 0 for tokens that the branch cannot sample, and NaN if logits are not finite.
        candidates = [(token, prob) for token, prob in zip(tokens, probs, strict=True) if prob > 0]
        candidates = candidates[: self.ready.width]
        if not candidates:
            return False
        self.beside += [(self.prob * prob, len(self.tokens), token, prob) for token, prob in candidates[1:]]
        token, prob = candidates[0]
        self.tokens.append(token)
        self.probs.append(prob)
        self.prob *= prob
        return len(self.tokens) < self.ready.depth and token not in self.ready.request.sequence.terminal_tokens

    @property
    def draft(self) -> Draft:
        """Return the chain with as many runners-up as fit."""
        if not self.beside:
            return Draft.chain(self.tokens, self.probs)
        best = sorted(self.beside, key=lambda one: -one[0])[: self.ready.request.nodes - len(self.tokens)]
        return Draft(
            (*self.tokens, *(token for _, _, token, _ in best)),
            (*range(-1, len(self.tokens) - 1), *(before - 1 for _, before, _, _ in best)),
            (*self.probs, *(prob for _, _, _, prob in best)),
        )


def possible_chain(tokens: list[int], probs: list[float]) -> Draft:
    """Return the chain up to the first token that cannot be sampled or is not finite."""
    count = 0
    for prob in probs:
        if not prob > 0:
            break
        count += 1
    return Draft.chain(tokens[:count], probs[:count])
