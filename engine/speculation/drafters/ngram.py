"""Prompt lookup: what followed the same tokens before, in any text of the model in this namespace.

``kernels.ngrams`` remembers the texts and says what guesses are worth. A namespace is a scope there, as for the cached
prefixes: nothing is learned from what others write. The texts of a search, the requests that name one lease in one
namespace, or the branches of one request otherwise, are told apart from those of earlier searches: these foresee more
than half of what the bundled policy writes in a tree search, the search's own texts a sixth.

The token that a branch draws after it was asked for is compared with what was known then, as guesses are: a sibling
that is one token ahead in the same step was no help.

**Cost.** Each token is read once: those that a branch draws, and those that it starts with only if no text of its
namespace begins with them. A step hands over the new tokens alone, in one call, and costs one or two microseconds for
each branch, however long the texts are, and next to nothing where nobody wants guesses: what is written meanwhile is
read when somebody does, some of it in each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.drafter import DraftRequest, HiddenStateNeeds, StepResult
from kernels.ngrams import NgramTable, hash_scope, hash_search

_PREFIX = 2048
"""Of a longer prefix the last one to two times as many tokens are read."""
_BACKLOG = 4096
"""Tokens that wait to be read, at most, of branches that are over. Those of the branches that ended last are kept."""
_AT_ONCE = 512
"""Tokens of these that one step reads, about: a tenth of a millisecond."""
_LEAST = 0.02
"""What is met with a smaller chance, with all before it, is not guessed: hardly any step would compute it."""


@dataclass(eq=False, slots=True)
class _Branch:
    tokens: list[int]
    """The sequence's, which grow."""
    done: int
    """Those before are read, or will never be."""
    begin: tuple[int, ...]
    """What the table hears before its first token."""
    place: int = -1
    """In the table; -1 before it hears of the branch."""
    over: bool = False

    @property
    def left(self) -> int:
        """Tokens that are to be read."""
        return len(self.tokens) - self.done


class NgramDrafter:
    """See ``Drafter``."""

    kind = "ngram"
    layers = 0
    hidden_state_needs = HiddenStateNeeds.NONE

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
        self._asked: list[_Branch] = []
        """Those that something was guessed for last."""
        self._unread: deque[_Branch] = deque()
        """Those that are over, the last one last; their tokens are read when somebody wants guesses."""
        self._waiting = 0
        """Tokens of these."""

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        """See ``Drafter``."""
        words: list[int] = []
        branches: list[_Branch] = []
        room = most = 0
        for sequence, depth, nodes in wishes:
            branch = self._branches.get(sequence)
            if branch is None:
                branch = self._branches[sequence] = _begin(sequence)
            self._write(words, branch, depth, nodes)
            branches.append(branch)
            room += nodes
            if nodes > most:
                most = nodes
        rows = len(wishes) + self._write_others(words, branches)
        counts, tokens, parents, chances = self._table.learn_and_propose(words, rows, room, most, _LEAST)
        drafts: list[Draft] = []
        start = 0
        for count in counts[: len(wishes)]:
            end = start + count
            drafts.append(Draft(tokens[start:end], parents[start:end], chances[start:end]) if count else EMPTY_DRAFT)
            start = end
        return drafts

    def _write(self, words: list[int], branch: _Branch, depth: int, nodes: int) -> None:
        """A branch's row for the table, with all tokens that are not read; they are then."""
        done, tokens = branch.done, branch.tokens
        branch.done = end = len(tokens)
        if branch.place < 0:
            branch.place = place = self._table.add_branch()
            words += (~place, end - done, depth, nodes, *branch.begin)
        else:
            words += (branch.place, end - done, depth, nodes)
        words += tokens[done:]

    def _write_others(self, words: list[int], asked: list[_Branch]) -> int:
        """Rows of branches that are asked for no guesses: those that had some in the last step with any, and some of
        those that are over. Answers how many."""
        rows = 0
        if asked != self._asked:
            for branch in self._asked:
                if branch.left and not branch.over:
                    self._write(words, branch, 0, 0)
                    rows += 1
            self._asked = asked
        late: list[_Branch] = []
        room = _AT_ONCE
        while self._unread and room > 0:
            branch = self._unread.popleft()
            room -= branch.left
            self._waiting -= branch.left
            self._write(words, branch, 0, 0)
            late.append(branch)
        # Who began in this step must not get the places of these.
        for branch in late:
            self._table.release_branch(branch.place)
        return rows + len(late)

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        """See ``Drafter``. What was drawn is read together with the next question."""

    def release(self, sequence: GenerateSequence) -> None:
        """See ``Drafter``. The branch's text stays."""
        branch = self._branches.pop(sequence, None)
        if branch is None and sequence.num_computed:
            branch = _begin(sequence)
        if branch is None:
            return
        # The text may be long, and what is to be read of it short.
        branch.tokens, branch.done, branch.over = branch.tokens[branch.done :], 0, True
        self._unread.append(branch)
        self._waiting += branch.left
        while self._waiting > _BACKLOG:
            lost = self._unread.popleft()
            self._waiting -= lost.left
            if lost.place >= 0:
                self._table.release_branch(lost.place)

    def clear_cache(self) -> None:
        """See ``Drafter``. There are none."""


def _begin(sequence: GenerateSequence) -> _Branch:
    """What is known about a branch that is new."""
    job = sequence.job
    scope = hash_scope(job.namespace)
    # A job's place in memory may be another's before.
    name = (id(job), job.arrived_at) if job.lease is None else job.lease
    start = max(0, sequence.num_prefix_tokens // _PREFIX - 1) * _PREFIX
    return _Branch(
        sequence.tokens, start, (scope, hash_search((job.namespace, name)), sequence.num_prefix_tokens - start)
    )
