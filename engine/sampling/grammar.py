"""Constrained sampling: the tokens that a branch may have next, by the language of its text.

The masks come from llguidance (https://github.com/guidance-ai/llguidance), which follows all derivations of the text so
far at once and walks the vocabulary as a tree of bytes. They are part of the sampling distribution: the logits of other
tokens become minus infinity before temperature and truncation. Any tokenization of a text of the language can be
sampled, and an end-of-sequence token only where the text is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.protocol.constraint import Constraint
from engine.protocol.empty_languages import find_emptiness
from engine.protocol.grammar_text import refuse_panics, summarize_error, write_grammar
from engine.protocol.types import InvalidRequest, NotSupported

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Words = npt.NDArray[np.int32]
"""Mask of a row: a bit for each token, set if the token is allowed, in the order of their ids."""

_MAX_COMPILED = 64
"""Number of compiled constraints that are kept; the requests of a search have the same one."""


class GrammarCompiler:
    """Compiles constraints for one tokenizer. Safe to use from several threads."""

    def __init__(self, write_tokenizer: Callable[[], str], vocab_size: int, eos: Iterable[int]) -> None:
        """``write_tokenizer`` returns the tokenizer as the JSON that ``tokenizers`` reads. ``eos``: the tokens that
        end a text.
        """
        self._write_tokenizer, self._vocab_size, self._eos = write_tokenizer, vocab_size, sorted(eos)
        self._tokenizer: LLTokenizer | None = None
        self._lock = Lock()
        self._compile = lru_cache(_MAX_COMPILED)(self._compile_uncached)

    def start(self, constraint: Constraint, tokens: Sequence[int], lifted_by: frozenset[int]) -> Grammar:
        """Return the grammar of a branch that has these constrained tokens already.

        ``lifted_by``: tokens that lift the constraint if one of them is the first. Raises ``InvalidRequest`` for a
        constraint that cannot be enforced, or that the tokens break.
        """
        matcher, tokenizer = self._compile(constraint)
        grammar = Grammar(matcher.deep_copy(), tokenizer, lifted_by)
        if grammar.count_valid(tokens) < len(tokens):
            raise InvalidRequest(
                "the branch's tokens do not fit the constraint: 'constraint_start' is the position from which it holds",
                "constraint",
            )
        for token in tokens:
            grammar.accept(token)
        return grammar

    def _compile_uncached(self, constraint: Constraint) -> tuple[LLMatcher, LLTokenizer]:
        with self._lock:
            matcher_class, tokenizer = self._load()
            with refuse_panics():
                matcher = matcher_class(tokenizer, write_grammar(constraint), log_level=0)
        if matcher.is_error():
            raise InvalidRequest(
                f"the constraint cannot be enforced: {summarize_error(matcher.get_error())}", "constraint"
            )
        reason = find_emptiness(constraint)
        if reason is None and not Grammar(matcher.deep_copy(), tokenizer, frozenset()).can_begin():
            reason = "the model has no token with which a text of it begins"
        if reason is not None:
            raise InvalidRequest(f"the constraint cannot be enforced: {reason}", "constraint")
        return matcher, tokenizer

    def _load(self) -> tuple[type[LLMatcher], LLTokenizer]:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise NotSupported(f"constraints need the package llguidance: pip install llguidance ({error})") from error
        if self._tokenizer is None:  # some tenths of a second for a large vocabulary
            if not self._eos:
                raise InvalidRequest("the model has no end-of-sequence token, so no text could end", "constraint")
            try:
                self._tokenizer = LLTokenizer(self._write_tokenizer(), n_vocab=self._vocab_size, eos_token=self._eos)
            except Exception as error:  # a tokenizer of a kind that it cannot read
                raise NotSupported(f"the bytes of this tokenizer's tokens cannot be read: {error}") from error
        return LLMatcher, self._tokenizer


class Grammar:
    """Position of one branch in its language.

    A pure function of the constraint and the branch's tokens, so a preempted, cut or replayed branch is at the same.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, lifted_by: frozenset[int]) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self._num_words = -(-tokenizer.vocab_size // 32)
        self._lifted_by = lifted_by
        """Tokens that lift the constraint if sampled next; empty after the first token."""
        self.is_lifted = False

    def accept(self, token: int) -> None:
        """Advance by the branch's next token. Raises ``InvalidRequest`` if the language has no such text."""
        if self.is_lifted:
            return
        if token in self._lifted_by:
            self.is_lifted = True
        else:
            with refuse_panics("follow"):
                is_accepted = self._matcher.consume_token(token)
            if not is_accepted:
                raise InvalidRequest(
                    f"the constraint does not allow token {token}: {self._describe_error()}", "constraint"
                )
        self._lifted_by = frozenset()

    def can_begin(self) -> bool:
        """Return True if the branch may have a next token, an end-of-sequence token included."""
        try:
            return bool(self._compute_mask(self._lifted_by).any())
        except InvalidRequest:
            return False

    def count_valid(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens the branch may have next, from the first on."""
        if not tokens or self.is_lifted or tokens[0] in self._lifted_by:
            return len(tokens)
        with refuse_panics("follow"):
            return self._matcher.validate_tokens(list(tokens))

    def find_valid(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Return the indices of the draft tokens that can be sampled, without what follows any other.

        ``tokens``, ``parents``: those of a ``Draft``.
        """
        valid: list[int] = []
        for index in range(len(tokens)):
            path = [tokens[step] for step in _indices_to(parents, index)]
            if parents[index] in (-1, *valid) and self.count_valid(path) == len(path):
                valid.append(index)
        return valid

    def find_forced(self) -> list[int]:
        """Return the tokens that most likely come next since the language has no other text, such as the name of a
        property; empty if the next character is a choice."""
        if self.is_lifted or self._lifted_by:
            return []
        with refuse_panics("follow"):
            forced = self._matcher.compute_ff_bytes()
            return self._tokenizer.tokenize_bytes(forced) if forced else []

    def compute_masks(self, tokens: Sequence[int], parents: Sequence[int]) -> list[Words | None]:
        """Return the masks after the branch's last token and after each draft token, all of which are valid.

        ``None`` stands for all tokens. Raises ``InvalidRequest`` if the language is too complex at this point, or if no
        token of the vocabulary goes on.
        """
        if self.is_lifted:
            return [None] * (1 + len(tokens))
        masks: list[Words | None] = [self._compute_mask(self._lifted_by)]
        # A copy, because an error stays in a matcher, and a draft token that leads to one may be rejected.
        ahead = Grammar(self._matcher.deep_copy(), self._tokenizer, frozenset()) if tokens else self
        path: list[int] = []
        """Indices of the draft tokens that the copy is after."""
        for index in range(len(tokens)):
            target = _indices_to(parents, index)
            if tokens[target[0]] in self._lifted_by:
                masks.append(None)
                continue
            num_shared = sum(1 for own, other in zip(path, target, strict=False) if own == other)
            try:
                ahead._move(len(path) - num_shared, [tokens[step] for step in target[num_shared:]])
                path = target
                masks.append(ahead._compute_mask(frozenset()))
            except InvalidRequest:  # no token can be accepted here: the branch ends if it comes here
                ahead, path = Grammar(self._matcher.deep_copy(), self._tokenizer, frozenset()), []
                masks.append(None)
        return masks

    def _move(self, num_back: int, tokens: Sequence[int]) -> None:
        with refuse_panics("follow"):
            self._matcher.rollback(num_back)
            self._matcher.consume_tokens(list(tokens))

    def _compute_mask(self, more: frozenset[int]) -> Words:
        words = np.zeros(self._num_words, np.int32)
        with refuse_panics("follow"):
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise InvalidRequest(f"the constraint cannot be followed here: {self._describe_error()}", "constraint")
        for token in more:
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        if not words.any():
            raise InvalidRequest(
                "the constraint cannot be followed here: no token of the model goes on with its text", "constraint"
            )
        return words

    def _describe_error(self) -> str:
        return summarize_error(self._matcher.get_error()) or "the text is complete"


def _indices_to(parents: Sequence[int], index: int) -> list[int]:
    """Return the indices of the draft tokens from the root to ``index``, inclusive."""
    indices: list[int] = []
    while index >= 0:
        indices.append(index)
        index = parents[index]
    return indices[::-1]


def restrict(logits: npt.NDArray[np.float32], masks: Mapping[int, Words]) -> None:
    """Set the logits of tokens that are not allowed to minus infinity, in some rows of ``[rows, vocab]``, in place."""
    for row, words in masks.items():
        allowed = np.unpackbits(words.view(np.uint8), count=logits.shape[1], bitorder="little")
        np.copyto(logits[row], -np.inf, where=allowed == 0)
