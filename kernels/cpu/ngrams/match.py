"""Reading tokens and proposing draft tokens for many branches in one call, from the table of ``kernels.ngrams``."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.ngrams.table import (
    RATES,
    REACH,
    RECORD,
    WIDTH,
    Table,
    add,
    ask_for,
    ask_for_records,
    ask_for_text,
    contexts_of,
    kind_of,
    longest,
    mix,
    rate,
    read,
    was_read,
)
from kernels.cpu.runtime.kernel import as_float, float32_array, function, int64_array, kernel, read_arguments

ROW, BEGIN = 4, 3
"""Words of a row before its tokens, and of a new branch before these."""

_SCOPE, _SEARCH, _TEXT, _KNOWN, _KIND, _COUNT, _SELDOM, _OWN, _RECORD, _LENGTH, _LAST = range(11)
"""What is known of a branch: its scope and search, the hash of what was read and how many tokens that was; the kind of
the match that the next token is compared with (-1: none) and how many followers it had, the kind of the one that the
search itself wrote (-1: none) and which that was; the longest context's record and its length; the last ``REACH``
tokens; the contexts that they make; the followers."""
_CONTEXTS = _LAST + REACH
_FOLLOWERS = _CONTEXTS + REACH
BRANCH = _FOLLOWERS + WIDTH
"""Words for a branch."""


@function
def _judge(rates: Any, branch: Any, token: int) -> None:
    """Compares the token that a branch drew with what was known to follow those before it when it was asked for."""
    if branch[_KIND] >= 0:
        was = False
        for slot in range(branch[_COUNT]):
            was = was or branch[_FOLLOWERS + slot] == token
        rate(rates, branch[_KIND], was)
        if branch[_SELDOM] >= 0:
            rate(rates, branch[_SELDOM], branch[_OWN] == token)
    branch[_KIND] = -1


@function
def _learn(table: Any, branch: Any, words: Any, first: int, count: int, old: int) -> None:
    """Reads the next ``count`` tokens of a branch, of which the first ``old`` come from a prefix."""
    last = branch[_LAST:_CONTEXTS]
    text, known, start = branch[_TEXT], branch[_KNOWN], 0
    if old > 0:
        whole = text
        for i in range(old):
            whole = mix(whole, words[first + i])
        if was_read(table, whole):
            # And so was all before.
            text, start = whole, old
            for i in range(min(old, REACH)):
                last[REACH - 1 - i] = words[first + old - 1 - i]
    for i in range(start, count):
        token = words[first + i]
        text = mix(text, token)
        table.clock[0] += 1
        if not read(table, text) or i >= old:
            context = branch[_SCOPE]
            for back in range(1, min(known + i, REACH) + 1):
                context = mix(context, last[REACH - back])
                add(table, context, token, branch[_SEARCH])
        for place in range(REACH - 1):
            last[place] = last[place + 1]
        last[REACH - 1] = token
    branch[_TEXT], branch[_KNOWN] = text, known + count
    contexts_of(table, branch[_SCOPE], last, min(known + count, REACH), branch[_CONTEXTS:_FOLLOWERS])


@function
def _follow(
    table: Any, branch: Any, match: Any, queue: Any, size: int, parent: int, path: float, chain: bool, least: float
) -> int:
    """Writes what may come after a ``match``, or the likeliest of it for a ``chain``, behind the ``size`` candidates of
    the ``queue``, but for what is met with a chance below ``least``; ``path`` is the chance of what lies before.
    Answers how many candidates there are."""
    tokens, parents, chances, paths = queue
    record, length = match
    records, rates = table.records, table.rates
    kind, behind, best, seldom, own = kind_of(records, record, length, branch[_SEARCH])
    if parent < 0:
        branch[_KIND], branch[_COUNT], branch[_SELDOM] = kind, behind, -1
        for slot in range(behind):
            branch[_FOLLOWERS + slot] = records[record + 1 + 3 * slot]
        if own >= 0:
            branch[_SELDOM], branch[_OWN] = seldom, records[record + 1 + 3 * own]
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
        if path * chance >= least:
            tokens[size], parents[size] = records[record + 1 + 3 * slot], parent
            chances[size], paths[size] = chance, path * chance
            size += 1
    return size


@function
def _guess(
    table: Any, branch: Any, depth: int, nodes: int, least: float, found: Any, queue: Any, depths: Any, window: Any
) -> int:
    """Guesses for a branch: those that are likeliest to be accepted, all before them too. Answers how many."""
    tokens, parents, chances = found
    node, path, count, size = -1, 1.0, 0, 0
    while count < nodes:
        ahead = depths[node] if node >= 0 else 0
        if ahead < depth:
            match = branch[_RECORD], branch[_LENGTH]
            if node >= 0:
                up, place = node, REACH
                while place > 0 and up >= 0:
                    place -= 1
                    window[place], up = tokens[up], parents[up]
                for back in range(place):
                    window[back] = branch[_CONTEXTS - place + back]
                count_ = min(branch[_KNOWN] + ahead, REACH)
                contexts_of(table, branch[_SCOPE], window, count_, window[REACH:])
                match = longest(table, window[REACH:], count_)
            if match[0] >= 0:
                size = _follow(table, branch, match, queue, size, node, path, depth == nodes, least)
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
def learn_and_guess(
    table: Any, words: Any, rows: int, room: int, most: int, least: float, whole: Any, real: Any
) -> None:
    """See ``NgramTable.learn_and_guess``: first all is judged, then all is read, and then guessed.

    ``whole`` and ``real`` get the numbers of guesses, ``[rows]``, and their tokens, parents and chances, ``[room]``
    each; ``most``: the most guesses of a row. Behind these is scratch, of ``sizes`` in all.
    """
    queued, scratch = (most + 1) * WIDTH, rows + 2 * room
    depths, window = whole[scratch : scratch + most], whole[scratch + most : scratch + most + 2 * REACH]
    scratch += most + 2 * REACH
    queue = (
        whole[scratch : scratch + queued],
        whole[scratch + queued : scratch + 2 * queued],
        real[room : room + queued],
        real[room + queued : room + 2 * queued],
    )
    done = 0
    for turn in range(5):
        at = 0
        for row in range(rows):
            place, count, depth, nodes = words[at], words[at + 1], words[at + 2], words[at + 3]
            first, old = at + ROW, 0
            new = place < 0
            if new:
                place, first, old = ~place, first + BEGIN, words[at + ROW + BEGIN - 1]
            branch = table.branches[place * BRANCH : (place + 1) * BRANCH]
            if turn == 0:
                if new:
                    scope = words[at + ROW]
                    branch[_SCOPE], branch[_SEARCH], branch[_TEXT] = scope, words[at + ROW + 1], scope
                    branch[_KNOWN], branch[_KIND] = 0, -1
                elif count > 0:
                    _judge(table.rates, branch, words[first])
                    ask_for(table, branch[_CONTEXTS:_FOLLOWERS], min(branch[_KNOWN], REACH))
            elif turn == 1:
                if count > 0:
                    ask_for_records(table, branch[_CONTEXTS:_FOLLOWERS], min(branch[_KNOWN], REACH))
                    ask_for_text(table, mix(branch[_TEXT], words[first]))
            elif turn == 2:
                if count > 0:
                    _learn(table, branch, words, first, count, old)
            elif turn == 3:
                contexts = branch[_CONTEXTS:_FOLLOWERS]
                branch[_RECORD], branch[_LENGTH] = longest(table, contexts, min(branch[_KNOWN], REACH))
            else:
                found = whole[rows + done :], whole[rows + room + done :], real[done:]
                whole[row] = _guess(table, branch, depth, nodes, least, found, queue, depths, window)
                done += whole[row]
            at = first + count


def sizes(rows: int, room: int, most: int) -> tuple[int, int]:
    """Words that ``whole`` and ``real`` have."""
    queued = (most + 1) * WIDTH
    return rows + 2 * room + most + 2 * REACH + 2 * queued, room + 2 * queued


@kernel
def learn_and_guess_natively(address: Any) -> None:
    """``learn_and_guess``: where the addresses of a table's arrays lie, and then the sizes of the first, of
    ``read`` and of ``branches``, of the scratch for whole and for real numbers, and the addresses of these; address
    and size of the words, numbers of rows, room and most, the least chance."""
    a, _, _ = read_arguments(address)
    t = int64_array(a[0], (14,))
    entries = t[7]
    table = Table(
        int64_array(t[0], (entries,)),
        int64_array(t[1], (entries,)),
        float32_array(t[2], (entries * RECORD,)).view(np.int32),
        int64_array(t[3], (2 * RATES,)).view(np.float64),
        int64_array(t[4], (t[8],)),
        int64_array(t[5], (1,)),
        int64_array(t[6], (t[9],)),
    )
    whole, real = int64_array(t[12], (t[10],)), int64_array(t[13], (t[11],)).view(np.float64)
    learn_and_guess(table, int64_array(a[1], (a[2],)), a[3], a[4], a[5], as_float(a[6]), whole, real)
