"""What the attention of a step is told, made by one kernel: to make it with NumPy takes longer than to attend.

``engine.attention.plan`` says which keys are read together, and is the reference of ``plan``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.cpu.attention.keys import STEP_WORDS
from kernels.cpu.runtime.kernel import function, int64_array, kernel, read_arguments

_SHARED = 8
"""Pieces shared with others that a token is in, about, at most. What lies in more it reads for itself."""
_WORK = 8
"""Integers of scratch for each row."""


def plan_room(rows: int, tokens: int, pages: int, tile: int) -> int:
    """Integers that ``plan`` needs for what it tells ``attend``, and meanwhile. ``pages``: of all rows, for
    ``attend``."""
    return pages + (7 + _SHARED) * tokens + 5 * _most_pieces(rows, tokens, tile) + _WORK * rows


@function
def _most_pieces(rows: int, tokens: int, tile: int) -> int:
    """A tree of prefixes parts less often than it has leaves; each row's own tokens make whole tiles and a rest."""
    return 2 * rows + tokens // tile


class _Step(NamedTuple):
    """The rows of a step, and what is made for their tokens."""

    pages: Any
    queries: Any
    contexts: Any
    page_size: int
    first: Any
    """``[tokens]`` the first key that each token reads for itself."""
    pieces: Any
    members: Any
    cost: Any
    """Bytes of a token, of what a piece costs, and of what a query costs more."""


class _Work(NamedTuple):
    """Scratch, an integer for each row."""

    starts: Any
    """Its first token."""
    full: Any
    """Pages that lie before its new tokens."""
    begins: Any
    """The page that it reads for itself first."""
    following: Any
    """The next row of a list of rows."""
    heads: Any
    """First and last row of each list."""
    tails: Any
    waiting: Any
    """``[rows, 2]`` lists whose rows share their page of a column, and the column."""


@kernel
def plan(address: Any) -> None:
    """``(words, room, pages, queries, contexts, trees, depths, masks, scratch, states, rows, tokens, columns, blocks,
    page_size, window, sharing, tile, token_bytes, piece, query, apart)``: writes the words of a step that ``attend``
    takes, and what these are addresses of into ``room`` (``plan_room``).

    The step's tokens are the last ``queries`` ``[rows]`` of ``contexts`` ``[rows]`` tokens in ``pages`` ``[rows,
    columns]``, each of which is ``blocks`` pages for ``attend``. ``trees`` is 0, or ``[rows, 2]``: where in ``masks``
    and ``depths`` a row's tree lies (``engine.attention.plan.Tree``), or -1. ``window``: 0 for none. ``sharing``:
    whether tokens may read together, at most ``tile`` of one row; ``token_bytes``, ``piece`` and ``query`` say when
    that is faster (``CostModel``). ``scratch``, ``apart`` floats a thread, and ``states`` are as ``attend`` wants them.
    """
    a, _, _ = read_arguments(address)
    rows, tokens, columns, blocks, tile = a[10], a[11], a[12], a[13], a[17]
    queries, contexts, pages = int64_array(a[3], rows), int64_array(a[4], rows), int64_array(a[2], (rows, columns))
    most = _most_pieces(rows, tokens, tile)
    of_tokens = a[1] + 8 * rows * columns * blocks
    pieces = of_tokens + 48 * tokens
    members = pieces + 40 * most
    work = members + 8 * (1 + _SHARED) * tokens
    kept = int64_array(a[1], (rows, columns, blocks))
    for row in range(rows):
        for column in range(columns):
            for block in range(blocks):
                kept[row, column, block] = pages[row, column] * blocks + block
    made = int64_array(of_tokens, (6, tokens))
    trees = int64_array(a[5], (rows if a[5] else 0, 2))
    window = a[15] if 0 < a[15] < contexts.max() else 0
    _place(pages, queries, contexts, a[14], made, (trees, a[6]), window)
    count, first, end = 0, made[1], made[2]
    if a[16] and not window and tokens > 1:
        found = int64_array(pieces, (most, 5)), int64_array(members, (1 + _SHARED) * tokens)
        step = _Step(pages, queries, contexts, a[14], first, found[0], found[1], (a[18], a[19], a[20]))
        lists = int64_array(work, (_WORK, rows))
        waiting = int64_array(work + 48 * rows, (rows, 2))
        count = _read_together(
            step, _Work(lists[0], lists[1], lists[2], lists[3], lists[4], lists[5], waiting), trees, tile
        )
    longest = 1
    for token in range(tokens):
        longest = max(longest, end[token] - first[token])
    words = int64_array(a[0], STEP_WORDS)
    words[0], words[1], words[7], words[10] = a[8], a[1], a[7], a[9]
    for part in range(5):
        words[2 + part] = of_tokens + 8 * tokens * part
    words[8], words[9], words[16] = pieces, members, of_tokens + 40 * tokens
    words[11], words[12], words[13], words[14], words[15] = tokens, columns * blocks, count, longest, a[21]


@function
def _place(pages: Any, queries: Any, contexts: Any, size: int, made: Any, trees: Any, window: int) -> None:
    """Where tokens lie and the keys that each sees, all of which it reads for itself as yet: its row, the first key and
    the end, what ``attend`` wants to know of its tree, and its slot."""
    row_of, first, end, tree_begin, tree_at, slots = made[0], made[1], made[2], made[3], made[4], made[5]
    (where, depths), token = trees, 0
    for row in range(len(queries)):
        count, context = queries[row], contexts[row]
        for query in range(count):
            place = position = context - count + query
            slots[token] = pages[row, place // size] * size + place % size
            row_of[token], end[token], tree_begin[token], tree_at[token] = row, place + 1, 0, -1
            if len(where) > 0 and where[row, 0] >= 0:
                position = context - count + int64_array(depths, where[row, 1] + count)[where[row, 1] + query]
                end[token], tree_begin[token], tree_at[token] = context, context - count, where[row, 0] + query * count
            first[token] = max(position + 1 - window, 0) if window else 0
            token += 1


@function
def _read_together(step: Any, work: Any, trees: Any, tile: int) -> int:
    """Writes what several tokens read together, and the first key that each then reads for itself; answers the number
    of pieces."""
    size, rows, start = step.page_size, len(step.queries), 0
    for row in range(rows):
        work.starts[row], work.full[row], work.begins[row] = start, (step.contexts[row] - step.queries[row]) // size, 0
        start += step.queries[row]
    pieces, used = _share_prefixes(step, work)
    for row in range(rows):
        start, count, before = work.starts[row], step.queries[row], step.contexts[row] - step.queries[row]
        begin = work.begins[row] * size
        for token in range(start, start + count):
            step.first[token] = begin
        if count == 1:
            continue
        whole = len(trees) > 0 and trees[row, 0] >= 0
        apart = count if whole else tile
        for offset in range(0, count, apart):
            some, end = min(apart, count - offset), before + offset
            if not _shares(step.cost, end - begin, some, some):
                continue
            _piece(step, pieces, row, begin, end, used)
            used = _join(step, pieces, start + offset, some, used)
            pieces += 1
            for token in range(start + offset, start + offset + some):
                step.first[token] = end
    return pieces


@function
def _shares(cost: Any, tokens: int, rows: int, queries: int) -> bool:
    """See ``CostModel.shares``."""
    return (rows - 1) * tokens * cost[0] > cost[1] + cost[2] * queries


@function
def _piece(step: Any, index: int, row: int, begin: int, end: int, used: int) -> None:
    """A piece without tokens."""
    piece = step.pieces[index]
    piece[0], piece[1], piece[2], piece[3], piece[4] = row, begin, end, used, used


@function
def _join(step: Any, index: int, start: int, count: int, used: int) -> int:
    """Adds ``count`` tokens to a piece."""
    for token in range(start, start + count):
        step.members[used] = token
        used += 1
    step.pieces[index, 4] = used
    return used


@function
def _share_prefixes(step: Any, work: Any) -> Any:
    """See ``engine.attention.plan.find_shared_prefixes``; the numbers of pieces and of their tokens."""
    pieces, used, room, size = 0, 0, _SHARED * len(step.first), step.page_size
    waiting = _by_page(step, work, _listed(work, -1, 0), 0, 0)
    while waiting:
        waiting -= 1
        head, split = work.waiting[waiting, 0], work.waiting[waiting, 1] + 1
        limit, members, queries = work.full[head], 0, 0
        row = head
        while row >= 0:
            limit, members, queries = min(limit, work.full[row]), members + 1, queries + step.queries[row]
            row = work.following[row]
        while split < limit and _same(step.pages, work.following, head, split):
            split += 1
        begin = work.begins[head]
        if used + queries <= room and _shares(step.cost, (split - begin) * size, members, queries):
            _piece(step, pieces, head, begin * size, split * size, used)
            row = head
            while row >= 0:
                used = _join(step, pieces, work.starts[row], step.queries[row], used)
                work.begins[row] = split
                row = work.following[row]
            pieces += 1
        waiting = _by_page(step, work, _listed(work, head, split), split, waiting)
    return pieces, used


@function
def _listed(work: Any, head: int, pages: int) -> int:
    """The first of a list of those rows of a list, or of all (-1), that have more than so many full pages."""
    first = last = -1
    row = 0 if head < 0 else head
    while 0 <= row < len(work.full):
        after = row + 1 if head < 0 else work.following[row]
        if work.full[row] > pages:
            if last < 0:
                first = row
            else:
                work.following[last] = row
            last = row
        row = after
    if last >= 0:
        work.following[last] = -1
    return first


@function
def _same(pages: Any, following: Any, head: int, column: int) -> bool:
    """Whether all rows of a list have the same page in a column."""
    row = following[head]
    while row >= 0:
        if pages[row, column] != pages[head, column]:
            return False
        row = following[row]
    return True


@function
def _by_page(step: Any, work: Any, head: int, column: int, waiting: int) -> int:
    """Divides a list by the page that its rows have in a column. Lists of several rows wait to be looked at; answers
    how many do now."""
    groups, row = 0, head
    while row >= 0:
        after, group = work.following[row], 0
        work.following[row] = -1
        while group < groups and step.pages[work.heads[group], column] != step.pages[row, column]:
            group += 1
        if group == groups:
            work.heads[group] = row
            groups += 1
        else:
            work.following[work.tails[group]] = row
        work.tails[group] = row
        row = after
    for group in range(groups):
        if work.heads[group] != work.tails[group]:
            work.waiting[waiting, 0], work.waiting[waiting, 1] = work.heads[group], column
            waiting += 1
    return waiting
