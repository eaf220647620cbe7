"""Draft tokens from n-grams: what followed the same tokens before, in a suffix tree of fixed size.

The last 1, 2, 4, 6, 9 or 12 tokens before a position are a context. For each context of the texts that were read, the
table counts the tokens that followed: prediction by partial matching (Cleary, Witten, "Data compression using adaptive
coding and partial string matching", 1984), without its blending. The longest context that is in the table predicts what
comes next, as the longest suffix does in SuffixDecoding (Oliaro et al., 2024, arXiv 2411.04975). Contexts are the nodes
of the texts' suffix tree at these depths, in a hash table instead of linked nodes: a token costs the same few additions
however long the texts are, nodes that are not used make room one by one, and texts of many searches share them. Trees
with every depth up to 12 predict 2 % more tokens of the bundled thinking policy, and those up to 16 or 32 fewer.

Texts are read in scopes, none of which sees the texts of another, and by searches within these: the table knows which
search wrote a follower last.

**Probabilities.** How often a match is right depends on the model, the temperature and the texts. So it is measured,
for each context length, number of occurrences and number of followers: how often the sampled token was among the
followers (the complement of PPM's escape probability). The probability of a follower is that rate times its share of
the occurrences. The branch will sample its token with noise that is known before (``kernels.common.noise``), so a
follower's occurrences are multiplied by ``exp(noise * g)`` for its Gumbel noise ``g``: with ``noise`` 1 the best
follower is a sample from the shares with the noise that the branch's own sample will have; a smaller weight suits
shares that are only estimates. Greedy branches have no noise. If the last follower that the search itself wrote is not
the most frequent one, the rate of such followers is measured separately, and the larger probability counts.

**Memory.** A context is a hash of 62 bits and lies in one of eight slots of the table, where the one that was added to
longest ago makes room. Two contexts with one hash cost wrong draft tokens, which cost time and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cpu.ngrams.match import BRANCH_WORDS, learn_and_propose, scratch_sizes
from kernels.cpu.ngrams.table import MAX_CONTEXT, NO_LENGTH, NUM_KINDS, NUM_LENGTHS, RECORD_WORDS, Table
from kernels.cpu.runtime.memory import allocate_resident

Ints = npt.NDArray[np.int64]

NUM_CONTEXTS = 1 << 18
"""Slots for contexts, 20 MiB. New text makes up to six contexts a token, thoughts of siblings one and a half."""
NUM_TEXTS = 1 << 17
"""Slots for texts that are known to be read, 1 MiB."""
LENGTHS = (1, 2, 4, 6, 9, 12)
"""Numbers of tokens of contexts. If eight are drafted for siblings' thoughts, 2.9 are accepted with these, and
2.3 with 1 to 4."""
NOISE = 0.5
"""Weight of the noise. With 0, a thirtieth fewer tokens of siblings' thoughts are accepted; with 1, of solutions that
are drafted from those of other problems."""
_MIN_BRANCHES = 64
"""Branches that there is room for at first."""


class NgramDrafts(NamedTuple):
    """Draft tokens of some branches, one branch after the other."""

    counts: tuple[int, ...]
    """Number of draft tokens of each row."""
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Index of each token's predecessor within the branch's draft tokens, -1 for the branch's last token."""
    probs: tuple[float, ...]
    """Probability that the token is accepted if its parent is."""


class NgramTable:
    """The table, and the state of the branches that draft tokens are proposed for."""

    def __init__(
        self,
        num_contexts: int = NUM_CONTEXTS,
        num_texts: int = NUM_TEXTS,
        *,
        lengths: Sequence[int] = LENGTHS,
        noise: float = NOISE,
    ) -> None:
        """``num_contexts``, ``num_texts``: numbers of slots, powers of two and at least 8. ``lengths``: up to
        ``NUM_LENGTHS`` numbers of tokens of contexts, ascending, at most ``MAX_CONTEXT``. ``noise``: its weight.
        """
        if not (0 < len(lengths) <= NUM_LENGTHS and list(lengths) == sorted({*lengths}) and lengths[-1] <= MAX_CONTEXT):
            raise ValueError(
                f"lengths {lengths}: up to {NUM_LENGTHS} ascending numbers of at most {MAX_CONTEXT} tokens"
            )
        self._table = Table(
            _allocate_zeros(2 * num_contexts).view(np.int64),
            _allocate_zeros(2 * num_contexts).view(np.int64),
            _allocate_zeros(num_contexts * RECORD_WORDS).view(np.int32),
            np.empty(2 * NUM_KINDS),
            _allocate_zeros(2 * num_texts).view(np.int64),
            np.empty(1, np.int64),
            np.array([*lengths, *[NO_LENGTH] * (NUM_LENGTHS + 1 - len(lengths))]),
            np.array([noise]),
            np.zeros(0, np.int64),
        )
        self._ints, self._floats = np.empty(0, np.int64), np.empty(0)
        """Results and scratch of the kernel."""
        self.clear()

    @property
    def num_bytes(self) -> int:
        """Memory of the table and the branches."""
        return sum(part.nbytes for part in self._table)

    def clear(self) -> None:
        """Forget everything, branches too."""
        table = self._table
        table.keys.fill(-1)
        table.texts.fill(-1)
        table.last_used.fill(0)
        table.clock.fill(0)
        # One hit and one miss before anything is seen.
        table.rates[0::2], table.rates[1::2] = 1.0, 2.0
        self._free_slots: list[int] = []
        self._set_branches(np.zeros(0, np.int64))

    def add_branch(self) -> int:
        """Return a slot for a new branch."""
        if not self._free_slots:
            branches = self._table.branches
            more = np.zeros(max(len(branches), _MIN_BRANCHES * BRANCH_WORDS), np.int64)
            self._set_branches(np.concatenate((branches, more)))
            self._free_slots = [*range(len(branches) // BRANCH_WORDS, len(self._table.branches) // BRANCH_WORDS)]
        return self._free_slots.pop()

    def release_branch(self, slot: int) -> None:
        """Free the slot of a branch that is finished."""
        self._free_slots.append(slot)

    def learn_and_propose(
        self, words: list[int], rows: int, max_total: int, max_nodes: int, min_prob: float
    ) -> NgramDrafts:
        """Read the new tokens of some branches, and then propose draft tokens for them.

        A branch gets the tree of the draft tokens that are likeliest to be accepted together with all before them, or
        a chain of the likeliest ones.

        ``words``: a row for each branch,

        0. its slot, or the complement (``~slot``) for a new branch,
        1. the number of new tokens that follow here,
        2. the most draft tokens after each other, and in all: if these are equal the draft is a chain; 0 for none;

        then for a new branch

        4. its scope and its search (``hash_scope``, ``hash_search``),
        6. how many of the tokens come from a prefix, which are not counted again if they were read in the scope before,
        7. the seed and the key of its noise, and the position of the first of these tokens,
        10. 1 if its tokens are sampled with noise, 0 if greedily;

        and then these tokens. ``rows``: number of rows; ``max_total``, ``max_nodes``: the most draft tokens of all rows
        together, and of one. ``min_prob``: tokens that are accepted with a smaller probability, together with all
        before them, are not proposed.
        """
        self._reserve(*scratch_sizes(rows, max_total, max_nodes))
        message = array("q", words)
        learn_and_propose(
            self._pointers_address,
            *message.buffer_info(),
            rows,
            max_total,
            max_nodes,
            float(min_prob),
            threads=1,
        )
        results = tuple(self._ints[: rows + 2 * max_total].tolist())
        counts, tokens, parents = results[:rows], results[rows : rows + max_total], results[rows + max_total :]
        return NgramDrafts(counts, tokens, parents, tuple(self._floats[:max_total].tolist()))

    def _reserve(self, num_ints: int, num_floats: int) -> None:
        if num_ints > len(self._ints) or num_floats > len(self._floats):
            self._ints, self._floats = np.empty(2 * num_ints, np.int64), np.empty(2 * num_floats)
            self._update_pointers()

    def _set_branches(self, branches: Ints) -> None:
        self._table = self._table._replace(branches=branches)
        self._update_pointers()

    def _update_pointers(self) -> None:
        """Write the addresses and sizes of all arrays for the kernel."""
        table, ints, floats = self._table, self._ints, self._floats
        sizes = map(len, (table.keys, table.texts, table.branches, ints, floats))
        addresses = [part.ctypes.data for part in (*table, ints, floats)]
        self._pointers = np.array([*addresses[: len(table)], *sizes, *addresses[len(table) :]])
        self._pointers_address = self._pointers.ctypes.data


def _allocate_zeros(size: int) -> npt.NDArray[np.float32]:
    memory: npt.NDArray[np.float32] = allocate_resident(size).numpy()
    return memory


def hash_scope(name: Hashable) -> int:
    """Return the scope of a name, within this process: 62 bits."""
    return hash(name) & (1 << 62) - 1


def hash_search(name: Hashable) -> int:
    """Return the search of a name, within this process: 31 bits. Searches with equal hashes are taken for one."""
    return hash(name) & (1 << 31) - 1
