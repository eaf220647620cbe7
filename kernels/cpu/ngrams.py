"""Reading and guessing for many branches in one call, from the table of ``kernels.ngrams``, which says what it is for.

Plain Python where numba is not installed, like ``kernels.cpu.ngram_table``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu import AVAILABLE
from kernels.cpu.ngram_table import (
    RATES,
    REACH,
    RECORD,
    WIDTH,
    Table,
    add,
    function,
    judge,
    kind_of,
    longest,
    mix,
    read_before,
)

if AVAILABLE:
    from kernels.cpu.launch import begin, floats, kernel, longs

ROW = 8
"""Words of a branch's row before its tokens."""


@function
def _follow(table: Any, match: Any, search: int, queue: Any, size: int, parent: int, path: float, chain: bool) -> int:
    """Writes what may come after a ``match``, or the likeliest of it for a ``chain``, behind the ``size`` candidates of
    the ``queue``; ``path`` is the probability of what lies before. Answers how many candidates there are."""
    tokens, parents, chances, paths = queue
    record, length = match
    records, rates = table.records, table.rates
    kind, behind, best, seldom, own = kind_of(records, record, length, search)
    share = rates[2 * kind] / rates[2 * kind + 1] / records[record]
    own_chance = rates[2 * seldom] / rates[2 * seldom + 1]
    first = 0
    if chain:
        if own >= 0 and own_chance > share * records[record + 2 + 3 * best]:
            best = own
        first, behind = best, best + 1
    for slot in range(first, behind):
        chance = share * records[record + 2 + 3 * slot]
        if slot == own:
            chance = max(chance, own_chance)
        tokens[size], parents[size] = records[record + 1 + 3 * slot], parent
        chances[size], paths[size] = chance, path * chance
        size += 1
    return size


@function
def _learn(table: Any, text: int, words: Any, at: int) -> int:
    """Reads the new tokens of the branch whose row begins at ``words[at]``; answers the hash of its text with them."""
    scope, search, old, before, count = words[at], words[at + 1], words[at + 3], words[at + 4], words[at + 5]
    start = at + ROW + before
    for i in range(count):
        token = words[start + i]
        text = mix(text, token)
        table.clock[0] += 1
        if read_before(table, text) and i < old:
            continue
        context = scope
        for back in range(1, min(before + i, REACH) + 1):
            context = mix(context, words[start + i - back])
            add(table, context, token, search)
    return text


@function
def _guess(table: Any, words: Any, at: int, found: Any, queue: Any, depths: Any, window: Any) -> int:
    """Guesses for the branch whose row begins at ``words[at]``: those that are likeliest to be accepted, all before
    them too. Answers how many."""
    scope, search, depth, nodes = words[at], words[at + 1], words[at + 6], words[at + 7]
    written = words[at + 4] + words[at + 5]
    end = at + ROW + written
    tokens, parents, chances = found
    node, path, count, size = -1, 1.0, 0, 0
    while count < nodes:
        if node < 0 or depths[node] < depth:
            up, place = node, REACH
            while place > 0 and up >= 0:
                place -= 1
                window[place], up = tokens[up], parents[up]
            missing = min(place, written)
            for back in range(1, missing + 1):
                window[place - back] = words[end - back]
            match = longest(table, scope, window, REACH, REACH - place + missing)
            if match[0] >= 0:
                size = _follow(table, match, search, queue, size, node, path, depth == nodes)
        best = -1
        for candidate in range(size):
            if queue[3][candidate] > (queue[3][best] if best >= 0 else 0.0):
                best = candidate
        if best < 0:
            break
        node, count = count, count + 1
        tokens[node], parents[node], chances[node] = queue[0][best], queue[1][best], queue[2][best]
        depths[node] = 1 + (depths[parents[node]] if parents[node] >= 0 else 0)
        path, queue[3][best] = queue[3][best], 0.0
    return count


@function
def learn_and_guess(table: Any, words: Any, branches: int, room: int, most: int, whole: Any, real: Any) -> None:
    """See ``NgramTable.learn_and_guess``: first all is judged, then all is read, and then guessed.

    ``words``: the hashes of the texts, and the rows. ``whole`` and ``real`` get the numbers of guesses, ``[branches]``,
    and their tokens, parents and chances, ``[room]`` each; ``most``: the most guesses of a branch. Behind these is
    scratch, of ``sizes`` in all.
    """
    queued, scratch = (most + 1) * WIDTH, branches + 2 * room
    depths, window = whole[scratch : scratch + most], whole[scratch + most : scratch + most + REACH]
    scratch += most + REACH
    queue = (
        whole[scratch : scratch + queued],
        whole[scratch + queued : scratch + 2 * queued],
        real[room : room + queued],
        real[room + queued : room + 2 * queued],
    )
    done = 0
    for turn in range(3):
        at = branches
        for branch in range(branches):
            before, count = words[at + 4], words[at + 5]
            if turn == 0:
                for i in range(words[at + 2]):
                    judge(table, words[at], words[at + 1], words, at + ROW + before + i, before + i)
            elif turn == 1:
                words[branch] = _learn(table, words[branch], words, at)
            else:
                found = whole[branches + done :], whole[branches + room + done :], real[done:]
                whole[branch] = _guess(table, words, at, found, queue, depths, window)
                done += whole[branch]
            at += ROW + before + count


def sizes(branches: int, room: int, most: int) -> tuple[int, int]:
    """Words that ``whole`` and ``real`` have."""
    queued = (most + 1) * WIDTH
    return branches + 2 * room + most + REACH + 2 * queued, room + 2 * queued


if AVAILABLE:

    @kernel
    def learn_and_guess_natively(address: Any) -> None:
        """``learn_and_guess``: the addresses of a table's arrays, the sizes of the first and of ``read``, address and
        size of the words, numbers of branches, room and most, addresses and sizes of what is written."""
        a, _, _ = begin(address)
        entries = a[6]
        table = Table(
            longs(a[0], (entries,)),
            longs(a[1], (entries,)),
            floats(a[2], (entries * RECORD,)).view(np.int32),
            longs(a[3], (2 * RATES,)).view(np.float64),
            longs(a[4], (a[7],)),
            longs(a[5], (1,)),
        )
        whole, real = longs(a[13], (a[15],)), longs(a[14], (a[16],)).view(np.float64)
        learn_and_guess(table, longs(a[8], (a[9],)), a[10], a[11], a[12], whole, real)
