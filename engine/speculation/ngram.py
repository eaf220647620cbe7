"""Prompt lookup: what followed the same tokens before, in any text of the model in this namespace.

``kernels.ngrams`` remembers the texts and says what guesses are worth. A namespace is a scope there, as for the cached
prefixes: nothing is learned from what others write. The texts of a search, the requests that name one lease in one
namespace, or the branches of one request otherwise, are told apart from those of earlier searches: these foresee more
than half of what the bundled policy writes in a tree search, the search's own texts a sixth.

What a step drew is compared with what was known before the step, as guesses are: a sibling that is one token ahead in
the same step was no help.

**Cost.** Each token is read once: those that a branch draws, and those that it starts with only as far as no text of
its namespace has them. A step costs one call and two or three microseconds for each branch, however long the texts are,
and next to nothing where nobody wants guesses: what is written meanwhile is read when somebody does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.cache.kv import KVCache
from engine.sequence import GenerateSequence
from engine.speculation.draft import EMPTY, Advance, Draft, Watch, Wish
from kernels.cpu.ngram_table import REACH
from kernels.ngrams import NgramTable, scope_of, search_of

_PREFIX = 2048
"""Of a longer prefix the last one to two times as many tokens are read."""

_BACKLOG = 4096
"""Tokens that wait to be read, at most, of branches that are over. Those of the branches that ended last are kept."""


@dataclass(eq=False, slots=True)
class _Branch:
    scope: int
    search: int
    tokens: list[int]
    """The sequence's, which grow."""
    prefix: int
    """How many of them it began with."""
    done: int
    """Those before are read, or will never be."""
    text: int
    """The hash of what is read."""
    judged: int = 0
    """The next tokens so many of which were drawn in a step that had guesses for it."""

    @property
    def left(self) -> int:
        """Tokens that are to be read."""
        return len(self.tokens) - self.done

    def write(self, rows: list[int], depth: int, nodes: int) -> None:
        """Its row for the table, with all tokens that are not read; they are then."""
        done, tokens = self.done, self.tokens
        end, before = len(tokens), done if done < REACH else REACH
        rows += (self.scope, self.search, self.judged, max(0, self.prefix - done), before, end - done, depth, nodes)
        rows += tokens[done - before :]
        self.done, self.judged = end, 0

    def shorten(self) -> None:
        """Forgets what need not be read again."""
        start = self.done - REACH
        if start > 0:
            self.tokens, self.prefix, self.done = self.tokens[start:], self.prefix - start, REACH


class NgramDrafter:
    """See ``Drafter``."""

    kind = "ngram"
    layers = 0
    watches = Watch.NONE

    def __init__(self) -> None:
        self._table = NgramTable()
        self._forget_branches()

    def reset(self, cache: KVCache) -> None:  # noqa: ARG002
        """See ``Drafter``."""
        self._table.clear()
        self._forget_branches()

    def _forget_branches(self) -> None:
        self._branches: dict[GenerateSequence, _Branch] = {}
        """Those that are not over."""
        self._guessed: list[_Branch] = []
        """Those that the step which goes on has guesses for."""
        self._drawn: list[_Branch] = []
        """Those that the last step with guesses had some for; what they drew is not read yet."""
        self._unread: deque[_Branch] = deque()
        """Those that are over, the last one last; their tokens are read when somebody wants guesses."""
        self._waiting = 0
        """Tokens of these."""

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """See ``Drafter``."""
        branches = [self._branch(wish.sequence) for wish in wishes]
        rows: list[int] = []
        for branch, (_, depth, nodes) in zip(branches, wishes, strict=True):
            branch.write(rows, depth, nodes)
        late = self._late()
        for branch in late:
            branch.write(rows, 0, 0)
        read = branches + late
        sizes = [wish.nodes for wish in wishes]
        texts, counts, tokens, parents, chances = self._table.learn_and_guess(
            [branch.text for branch in read], rows, sum(sizes), max(sizes, default=0)
        )
        for branch, text in zip(read, texts, strict=True):
            branch.text = text
        self._guessed = branches
        drafts, start = [], 0
        for count in counts[: len(wishes)]:
            end = start + count
            drafts.append(Draft(tokens[start:end], parents[start:end], chances[start:end]) if count else EMPTY)
            start = end
        return drafts

    def advance(self, steps: Sequence[Advance], hidden: Tensor) -> None:  # noqa: ARG002
        """See ``Drafter``. What was drawn is read together with the next question."""
        for branch in self._guessed:
            branch.judged = len(branch.tokens) - branch.done
        if self._guessed:
            self._drawn, self._guessed = self._guessed, []

    def forget(self, sequence: GenerateSequence) -> None:
        """See ``Drafter``. The branch's text stays."""
        branch = self._branches.pop(sequence, None)
        if branch is None and sequence.computed:
            branch = _begin(sequence)
        if branch is None or branch.judged or not branch.left:
            return
        branch.shorten()
        self._unread.append(branch)
        self._waiting += branch.left
        while self._waiting > _BACKLOG:
            self._waiting -= self._unread.popleft().left

    def clear_cache(self) -> None:
        """See ``Drafter``. There are none."""

    def _branch(self, sequence: GenerateSequence) -> _Branch:
        """What is known about a branch, be it new."""
        branch = self._branches.get(sequence)
        if branch is None:
            branch = self._branches[sequence] = _begin(sequence)
        return branch

    def _late(self) -> list[_Branch]:
        """Other branches with tokens that are not read: those that have drawn some, and those that are over."""
        late = [branch for branch in self._drawn if branch.judged]
        late += self._unread
        self._drawn = []
        self._unread.clear()
        self._waiting = 0
        return late


def _begin(sequence: GenerateSequence) -> _Branch:
    """What is known about a branch that is new."""
    job = sequence.job
    scope = scope_of(job.namespace)
    # A job's place in memory may be another's before.
    name = (id(job), job.arrived) if job.lease is None else job.lease
    start = max(0, sequence.prefix // _PREFIX - 1) * _PREFIX
    return _Branch(scope, search_of((job.namespace, name)), sequence.tokens, sequence.prefix, start, scope)
