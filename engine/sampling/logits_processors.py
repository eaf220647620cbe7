"""Logits processors: bias, penalties, forbidden tokens and grammars, applied to the logits before sampling.

They are applied to the raw logits in this order:

1. logit bias (OpenAI): added;
2. repetition penalty (transformers; CTRL, Keskar et al. 2019): for tokens of the prompt and generated ones, positive
   logits are divided by it, negative ones multiplied;
3. frequency penalty (OpenAI): subtracted once for each time that the token was generated;
4. presence penalty (OpenAI): subtracted once if the token was generated at all;
5. before ``min_tokens``: minus infinity for every token that would end the branch;
6. under a constraint: minus infinity for every token that the grammar does not allow.

Temperature and truncation follow (``engine.sampling.sampler``). This is vLLM's order except for the masks, which
commute with the penalties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.protocol.types import SamplingParams
from engine.sampling.grammar import Words, restrict

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Penalties:
    """Bias and penalties of one branch with its token counts, updated after each generated token.

    The state is a pure function of the parameters and the branch's tokens, so a preempted, cut or replayed branch has
    the same.
    """

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int]) -> None:
        self.repetition = sampling.repetition_penalty
        self.frequency = sampling.frequency_penalty
        self.presence = sampling.presence_penalty
        bias = dict(sampling.logit_bias)
        seen = np.unique(np.array(prompt if self.repetition != 1 else (), np.int64))
        tokens = np.union1d(seen, np.array(list(bias), np.int64))
        self._initial_tokens = tokens
        """Tokens of the prompt and of the bias, sorted; shared by the branches of a request."""
        self._indices: dict[int, int] = {}
        """Indices of generated tokens in the arrays below; other tokens are looked up in ``_initial_tokens``."""
        self.size = len(tokens)
        self._tokens = tokens
        self._bias = np.array([bias.get(token, 0.0) for token in tokens.tolist()], np.float32)
        self._seen = np.isin(tokens, seen)
        self._counts = np.zeros(len(tokens), np.float32)
        if sampling.penalty_start is not None:
            for token in prompt[sampling.penalty_start :]:
                self.add(token)

    @classmethod
    def is_needed(cls, sampling: SamplingParams) -> bool:
        """Return True if a request with these parameters has a bias or penalties."""
        return bool(
            sampling.logit_bias
            or sampling.repetition_penalty != 1
            or sampling.frequency_penalty
            or sampling.presence_penalty
        )

    def fork(self, generated: Sequence[int]) -> Penalties:
        """Return a copy for another branch, which has generated these tokens."""
        fork = object.__new__(Penalties)  # copy.copy takes half as long again
        fork.repetition, fork.frequency, fork.presence = self.repetition, self.frequency, self.presence
        fork._initial_tokens, fork._indices, fork.size = self._initial_tokens, dict(self._indices), self.size
        fork._tokens, fork._bias = self._tokens.copy(), self._bias.copy()
        fork._seen, fork._counts = self._seen.copy(), self._counts.copy()
        for token in generated:
            fork.add(token)
        return fork

    def add(self, token: int) -> None:
        index = self._indices.get(token)
        if index is None:
            index = int(self._initial_tokens.searchsorted(token))
            if index == len(self._initial_tokens) or self._initial_tokens[index] != token:
                index = self.size
                self._grow()
                self._tokens[index] = token
            self._indices[token] = index
            self._seen[index] = True
        self._counts[index] += 1

    def _grow(self) -> None:
        if self.size == len(self._tokens):
            room = max(16, self.size)
            self._tokens = np.concatenate((self._tokens, np.zeros(room, np.int64)))
            self._bias = np.concatenate((self._bias, np.zeros(room, np.float32)))
            self._seen = np.concatenate((self._seen, np.zeros(room, np.bool_)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.float32)))
        self.size += 1

    @property
    def tokens(self) -> Ints:
        """Tokens that have a bias or occurred before, each once."""
        return self._tokens[: self.size]

    @property
    def bias(self) -> Floats:
        return self._bias[: self.size]

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """True for the tokens that the repetition penalty applies to."""
        return self._seen[: self.size]

    @property
    def counts(self) -> Floats:
        """Number of times each token was generated."""
        return self._counts[: self.size]


class LogitsRow(NamedTuple):
    """Logits processors of one row of logits, applied before a token is sampled or drafted from it."""

    penalties: Penalties | None
    """Bias and penalties of the branch, with the tokens it has generated so far."""
    forbidden: Ints | None
    draft_prefix: Sequence[int]
    """Draft tokens between the branch and this row; the penalties count them as generated."""
    allowed: Words | None = None
    """Mask of the tokens that the branch's grammar allows; ``None`` for all."""


def apply_logits_processors(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """Apply the processors to ``logits`` ``[rows, vocab]`` on the host, in place."""
    penalties, forbidden, masks = penalties_by_row(rows), forbidden_by_row(rows), masks_by_row(rows)
    if penalties:
        penalise(logits.numpy(), penalties)
    if forbidden:
        forbid(logits.numpy(), forbidden)
    if masks:
        restrict(logits.numpy(), masks)


def penalties_by_row(rows: Sequence[LogitsRow]) -> dict[int, Penalties]:
    """Return the penalties of the rows that have any, by row index, with their draft prefixes counted."""
    return {
        index: row.penalties.fork(row.draft_prefix) if row.draft_prefix else row.penalties
        for index, row in enumerate(rows)
        if row.penalties is not None
    }


def forbidden_by_row(rows: Sequence[LogitsRow]) -> dict[int, Ints]:
    """Return the forbidden tokens of the rows that have any, by row index."""
    return {index: row.forbidden for index, row in enumerate(rows) if row.forbidden is not None}


def masks_by_row(rows: Sequence[LogitsRow]) -> dict[int, Words]:
    """Return the grammars' masks of the rows that have any, by row index."""
    return {index: row.allowed for index, row in enumerate(rows) if row.allowed is not None}


def penalise(logits: Floats, penalties: Mapping[int, Penalties]) -> None:
    """Apply bias and penalties to some rows of ``logits`` ``[rows, vocab]`` in place."""
    branches = penalties.values()
    sizes = [own.size for own in branches]
    tokens = np.concatenate([own.tokens for own in branches])
    seen = np.concatenate([own.seen for own in branches])
    counts = np.concatenate([own.counts for own in branches])
    settings = np.array([(own.repetition, own.frequency, own.presence) for own in branches], np.float32)
    row = np.repeat(list(penalties), sizes)
    repetition, frequency, presence = np.repeat(settings, sizes, axis=0).T
    values = logits[row, tokens] + np.concatenate([own.bias for own in branches])
    repeated = np.where(values > 0, values / repetition, values * repetition)
    values = np.where(seen, repeated, values)
    values -= frequency * counts + presence * (counts > 0)
    logits[row, tokens] = values


def forbid(logits: Floats, forbidden: Mapping[int, Ints]) -> None:
    """Set the logits of some rows' tokens to minus infinity in place."""
    row = np.repeat(list(forbidden), [len(tokens) for tokens in forbidden.values()])
    logits[row, np.concatenate(list(forbidden.values()))] = -np.inf
