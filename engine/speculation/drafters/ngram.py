"""N-gram drafter (suffix decoding): tokens that followed the same tokens before, in any text of the namespace.

``kernels.ngrams`` stores the texts and rates continuations. A namespace is a scope there, as for cached prefixes:
nothing is learned across namespaces. The texts of a search (the requests with one pin key in one namespace, or the
branches of one request otherwise) are distinguished from those of earlier searches: these predict more than half of
what the bundled policy writes in a tree search, the search's own texts a sixth.

**Cost.** Each token is read once: those that a branch samples, and those that it starts with only if no text of its
namespace begins with them. A step passes the new tokens alone, in one call, and costs some microseconds per
branch, however long the texts are, and almost nothing while no drafts are requested: tokens sampled meanwhile are read
with the next drafts, some of them in each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.attention.layer import HeadShape
from engine.cache.paged_kv import KVCache
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.drafter import DraftRequest, HiddenStateNeeds, StepResult
from kernels.ngrams import NgramTable, hash_scope, hash_search

_PREFIX = 2048
"""Length of the end of a prefix that is read: between this and twice this many tokens."""
_BACKLOG = 4096
"""Maximum number of unread tokens of finished branches; the latest branches' are kept."""
_AT_ONCE = 512
"""Approximate number of such tokens read in one step: a tenth of a millisecond."""
_LEAST = 0.02
"""Minimum probability that a draft token and all before it are accepted; hardly any step would verify others."""


@dataclass(eq=False, slots=True)
class _Branch:
    tokens: list[int]
    """The sequence's list of tokens, which grows."""
    num_read: int
    """Number of tokens that are read or skipped for good."""
    begin: tuple[int, ...]
    """Words for the table before the first token."""
    slot: int = -1
    """Slot in the table; -1 before the table has the branch."""
    is_finished: bool = False

    @property
    def num_unread(self) -> int:
        """Number of unread tokens."""
        return len(self.tokens) - self.num_read


class NgramDrafter:
    """A ``Drafter`` without a model."""

    kind = "ngram"
    key_shapes: tuple[HeadShape, ...] = ()
    hidden_state_needs = HiddenStateNeeds.NONE
    observed_layers: tuple[int, ...] = ()

    def __init__(self, table: NgramTable | None = None) -> None:
        """``table``: an empty table, by default one of the default size."""
        self._table = NgramTable() if table is None else table
        self._forget_branches()

    def reset(self, cache: KVCache) -> None:  # noqa: ARG002
        self._table.clear()
        self._forget_branches()

    def _forget_branches(self) -> None:
        self._branches: dict[GenerateSequence, _Branch] = {}
        """Running branches."""
        self._last_drafted: list[_Branch] = []
        """Branches of the last drafts."""
        self._unread: deque[_Branch] = deque()
        """Finished branches, the latest one last, whose tokens are read with the next drafts."""
        self._num_unread = 0
        """Number of tokens of ``_unread``."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        words: list[int] = []
        branches: list[_Branch] = []
        room = most = 0
        for sequence, depth, nodes in requests:
            branch = self._branches.get(sequence)
            if branch is None:
                branch = self._branches[sequence] = _begin(sequence)
            self._write(words, branch, depth, nodes)
            branches.append(branch)
            room += nodes
            if nodes > most:
                most = nodes
        rows = len(requests) + self._write_others(words, branches)
        counts, tokens, parents, probs = self._table.learn_and_propose(words, rows, room, most, _LEAST)
        drafts: list[Draft] = []
        start = 0
        for count in counts[: len(requests)]:
            end = start + count
            drafts.append(Draft(tokens[start:end], parents[start:end], probs[start:end]) if count else EMPTY_DRAFT)
            start = end
        return drafts

    def _write(self, words: list[int], branch: _Branch, depth: int, nodes: int) -> None:
        """Append a branch's row for the table, with all unread tokens, which are read then."""
        num_read, tokens = branch.num_read, branch.tokens
        branch.num_read = end = len(tokens)
        if branch.slot < 0:
            branch.slot = slot = self._table.add_branch()
            words += (~slot, end - num_read, depth, nodes, *branch.begin)
        else:
            words += (branch.slot, end - num_read, depth, nodes)
        words += tokens[num_read:]

    def _write_others(self, words: list[int], drafted: list[_Branch]) -> int:
        """Append rows of branches without a request: those of the last drafts, and some finished ones; return their
        number."""
        rows = 0
        if drafted != self._last_drafted:
            for branch in self._last_drafted:
                if branch.num_unread and not branch.is_finished:
                    self._write(words, branch, 0, 0)
                    rows += 1
            self._last_drafted = drafted
        finished: list[_Branch] = []
        room = _AT_ONCE
        while self._unread and room > 0:
            branch = self._unread.popleft()
            room -= branch.num_unread
            self._num_unread -= branch.num_unread
            self._write(words, branch, 0, 0)
            finished.append(branch)
        # Branches that began in this step must not get the slots of these.
        for branch in finished:
            self._table.release_branch(branch.slot)
        return rows + len(finished)

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        """Do nothing: new tokens are read with the next draft."""

    def release(self, sequence: GenerateSequence) -> None:
        """Keep the branch's text, to be read with the next drafts."""
        branch = self._branches.pop(sequence, None)
        if branch is None and sequence.num_computed:
            branch = _begin(sequence)
        if branch is None:
            return
        # The text may be long and its unread part short.
        branch.tokens, branch.num_read, branch.is_finished = branch.tokens[branch.num_read :], 0, True
        self._unread.append(branch)
        self._num_unread += branch.num_unread
        while self._num_unread > _BACKLOG:
            dropped = self._unread.popleft()
            self._num_unread -= dropped.num_unread
            if dropped.slot >= 0:
                self._table.release_branch(dropped.slot)

    def warm_ups(self) -> list[Callable[[], None]]:
        """Return nothing: no draft is captured."""
        return []

    def clear_cache(self) -> None:
        """Do nothing: there are no keys and values."""


def _begin(sequence: GenerateSequence) -> _Branch:
    """Return the state of a new branch."""
    request = sequence.request
    scope = hash_scope(request.namespace)
    # The id of a request may have been another request's before.
    name = (id(request), request.arrived_at) if request.pin_key is None else request.pin_key
    start = max(0, sequence.num_prefix_tokens // _PREFIX - 1) * _PREFIX
    search = hash_search((request.namespace, name))
    is_sampled = int(sequence.sampling.temperature > 0)
    num_prefix = sequence.num_prefix_tokens - start
    begin = (scope, search, num_prefix, sequence.seed, sequence.key, start, is_sampled)
    return _Branch(sequence.tokens, start, begin)
