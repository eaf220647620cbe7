"""What came after the same tokens before, in a table of fixed size that one call reads or writes for many branches.

The last 1 to 4 tokens before a position are a context. For each context of the texts that were read the table counts
the tokens that followed: prediction by partial matching (Cleary, Witten, "Data compression using adaptive coding and
partial string matching", 1984), without its blending. What comes next is looked up by the longest context that was met
before. Texts are read in scopes, of which none sees what was read in another, and by searches within these: the table
knows which search wrote a follower last.

**Chances.** How much a match is worth depends on the model, the temperature and the texts, so it is measured, for each
length, number of occurrences and number of followers: how often the token that was drawn was among the followers (the
complement of PPM's escape probability). A follower's chance is that rate times its share of the occurrences. Where the
search knows better, its own texts decide: if the last token that it wrote there is not the likeliest, that token's
chance is measured for itself, and the larger one counts.

**Memory.** A context is known by a hash of 62 bits, and lies in one of eight places of the table, where what was added
to longest ago makes room. Two contexts with one hash cost wrong guesses, which cost time and nothing else. Lengths of
1, 2, 4 and 8 tokens foresee no more of what the bundled models write, and make three times as many contexts.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cpu.ngrams import match as kernels
from kernels.cpu.ngrams.match import BRANCH
from kernels.cpu.ngrams.table import RATES, RECORD, Table
from kernels.cpu.runtime.memory import resident

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ENTRIES = 1 << 18
"""Contexts: 20 MiB. New text makes two or three for each token, what the bundled models write one for four tokens."""
TEXTS = 1 << 17
"""Beginnings of texts of which it is known that they were read: 1 MiB."""
_FEWEST = 64
"""Places for branches at first."""


class Found(NamedTuple):
    """Guesses for some branches, those of the first one first."""

    counts: tuple[int, ...]
    """How many guesses each row has."""
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Within the branch, as in ``engine.scheduler.draft.Draft``."""
    chances: tuple[float, ...]


class NgramTable:
    """See above."""

    def __init__(self, entries: int = ENTRIES, texts: int = TEXTS) -> None:
        """Powers of two, of 8 at least: how many contexts and beginnings of texts are kept."""
        self._arrays = Table(
            _resident(2 * entries).view(np.int64),
            _resident(2 * entries).view(np.int64),
            _resident(entries * RECORD).view(np.int32),
            np.empty(2 * RATES),
            _resident(2 * texts).view(np.int64),
            np.empty(1, np.int64),
            np.zeros(0, np.int64),
        )
        self._whole, self._real = np.empty(0, np.int64), np.empty(0)
        """What guessing writes to."""
        self.clear()

    def clear(self) -> None:
        """Forgets everything, branches too."""
        keys, used, _, rates, read, clock, _ = self._arrays
        keys.fill(-1)
        read.fill(-1)
        used.fill(0)
        clock.fill(0)
        # One case for and one against before anything is seen.
        rates[0::2], rates[1::2] = 1.0, 2.0
        self._free: list[int] = []
        self._hold(np.zeros(0, np.int64))

    def take(self) -> int:
        """A place for a new branch."""
        if not self._free:
            before = len(self._arrays.branches)
            self._hold(np.concatenate((self._arrays.branches, np.zeros(max(before, _FEWEST * BRANCH), np.int64))))
            self._free = [*range(before // BRANCH, len(self._arrays.branches) // BRANCH)]
        return self._free.pop()

    def leave(self, place: int) -> None:
        """The branch at a place is over."""
        self._free.append(place)

    def _hold(self, branches: Ints) -> None:
        """What is known of branches lies there from now on."""
        self._arrays = self._arrays._replace(branches=branches)
        self._find()

    def _find(self) -> None:
        """Where everything lies, for the kernel."""
        arrays, whole, real = self._arrays, self._whole, self._real
        sizes = map(len, (arrays.keys, arrays.read, arrays.branches, whole, real))
        places = [each.ctypes.data for each in (*arrays, whole, real)]
        self._places = np.array([*places[: len(arrays)], *sizes, *places[len(arrays) :]])
        self._at = self._places.ctypes.data

    def learn_and_guess(self, words: list[int], rows: int, room: int, most: int, least: float) -> Found:
        """Reads what some branches have written, and guesses what comes next: for each branch a tree of those guesses
        that are likeliest to be accepted, all before them too, or a chain of likeliest ones.

        ``words``: a row for each branch,

        0. its place, or the place's complement (``~place``) for a new branch,
        1. how many new tokens follow here,
        2. the most guesses after each other, and in all: as many mean a chain, 0 none;

        then of a new branch

        4. its scope and its search, see ``scope_of`` and ``search_of``,
        6. how many tokens come from a prefix, of which nothing counts again that was read in the scope before;

        and then these tokens. ``rows``: how many these are, ``room``: the most guesses of all of them, ``most``: of
        one. What is accepted with a chance below ``least``, with all before it, is not guessed.
        """
        self._make_room(*kernels.sizes(rows, room, most))
        whole, real, message = self._whole, self._real, array("q", words)
        kernels.learn_and_guess_natively(self._at, *message.buffer_info(), rows, room, most, float(least), threads=1)
        numbers = tuple(whole[: rows + 2 * room].tolist())
        counts, tokens, parents = numbers[:rows], numbers[rows : rows + room], numbers[rows + room :]
        return Found(counts, tokens, parents, tuple(real[:room].tolist()))

    def _make_room(self, whole: int, real: int) -> None:
        if whole > len(self._whole) or real > len(self._real):
            self._whole, self._real = np.empty(2 * whole, np.int64), np.empty(2 * real)
            self._find()


def _resident(size: int) -> npt.NDArray[np.float32]:
    """``size`` zeros."""
    memory: npt.NDArray[np.float32] = resident(size).numpy()
    return memory


def scope_of(name: Hashable) -> int:
    """The scope of that name, within this process: 62 bits."""
    return hash(name) & (1 << 62) - 1


def search_of(name: Hashable) -> int:
    """The search of that name, within this process: 31 bits. Two searches of one number are taken for one."""
    return hash(name) & (1 << 31) - 1
