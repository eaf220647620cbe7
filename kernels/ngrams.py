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

from kernels.cpu import AVAILABLE
from kernels.cpu import ngrams as kernels
from kernels.cpu.ngram_table import RATES, RECORD, Table

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ENTRIES = 1 << 18
"""Contexts: 20 MiB. New text makes two or three for each token, what the bundled models write one for four tokens."""
TEXTS = 1 << 17
"""Beginnings of texts of which it is known that they were read: 1 MiB."""


class Found(NamedTuple):
    """Guesses for some branches, those of the first one first."""

    texts: list[int]
    """The hashes of what is read of each branch now."""
    counts: list[int]
    """How many guesses each branch has."""
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Within the branch, as in ``engine.speculation.draft.Draft``."""
    chances: tuple[float, ...]


class NgramTable:
    """See above."""

    def __init__(self, entries: int = ENTRIES, texts: int = TEXTS) -> None:
        """Powers of two, of 8 at least: how many contexts and beginnings of texts are kept."""
        self._arrays = Table(
            np.empty(entries, np.int64),
            np.empty(entries, np.int64),
            np.zeros(entries * RECORD, np.int32),
            np.empty(2 * RATES),
            np.empty(texts, np.int64),
            np.empty(1, np.int64),
        )
        self._scratch = _scratch(0, 0)
        self._native = (*(each.ctypes.data for each in self._arrays), entries, texts)
        self._plain = Table(*(each.data for each in self._arrays))
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        keys, used, _, rates, read, clock = self._arrays
        keys.fill(-1)
        read.fill(-1)
        used.fill(0)
        clock.fill(0)
        # One case for and one against before anything is seen.
        rates[0::2], rates[1::2] = 1.0, 2.0

    def learn_and_guess(self, texts: list[int], rows: list[int], room: int, most: int) -> Found:
        """Reads what some branches have written, and guesses what comes next: for each branch a tree of those guesses
        that are likeliest to be accepted, all before them too, or a chain of likeliest ones.

        ``texts``: for each branch the hash of what was read of it; before its first token it is its scope. ``rows``:
        for each branch

        0. its scope and its search, see ``scope_of`` and ``search_of``,
        2. how many of its new tokens are compared with what was known before,
        3. how many come from a prefix, of which nothing counts again that was read in the scope before,
        4. how many tokens before them follow here (``REACH``, or all if there are fewer), and how many new ones,
        6. the most guesses after each other, and in all: as many mean a chain, 0 none;

        and then these tokens. ``room``: the most guesses of all branches, ``most``: of one.
        """
        words, branches = array("q", texts + rows), len(texts)
        self._make_room(*kernels.sizes(branches, room, most))
        whole, real, *places = self._scratch
        if AVAILABLE:
            kernels.learn_and_guess_natively(
                *self._native, *words.buffer_info(), branches, room, most, *places, threads=1
            )
        else:
            kernels.learn_and_guess(self._plain, words, branches, room, most, whole.data, real.data)
        counts = whole[:branches].tolist()
        total = sum(counts)
        tokens, parents = branches, branches + room
        return Found(
            words[:branches].tolist(),
            counts,
            tuple(whole[tokens : tokens + total].tolist()),
            tuple(whole[parents : parents + total].tolist()),
            tuple(real[:total].tolist()),
        )

    def _make_room(self, whole: int, real: int) -> None:
        if whole > len(self._scratch.whole) or real > len(self._scratch.real):
            self._scratch = _scratch(2 * whole, 2 * real)


class _Scratch(NamedTuple):
    """What guessing writes to: whole and real numbers, where these lie, and how many there are."""

    whole: Ints
    real: Floats
    at_whole: int
    at_real: int
    size_whole: int
    size_real: int


def _scratch(whole: int, real: int) -> _Scratch:
    ints, floats = np.empty(whole, np.int64), np.empty(real)
    return _Scratch(ints, floats, ints.ctypes.data, floats.ctypes.data, whole, real)


def scope_of(name: Hashable) -> int:
    """The scope of that name, within this process: 62 bits."""
    return hash(name) & (1 << 62) - 1


def search_of(name: Hashable) -> int:
    """The search of that name, within this process: 31 bits. Two searches of one number are taken for one."""
    return hash(name) & (1 << 31) - 1
