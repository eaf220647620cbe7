"""Planning the attention of a step, in one kernel: planning with NumPy takes longer than attending.

``engine.attention.plan`` defines which keys are read together, and is the reference of ``plan_step``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.cpu.attention.keys import STEP_WORDS
from kernels.cpu.runtime.kernel import function, int64_array, kernel, read_arguments

MAX_SHARED = 8
"""Mean number of shared pieces that a token is in, at most. Keys of further pieces it reads for itself."""
_NO_PAGE = 1 << 62
_ROW_WORDS = 7
"""Words of scratch for each row."""


def plan_size(rows: int, tokens: int, pages: int, tile: int) -> int:
    """Return the words of result and scratch that ``plan_step`` needs. ``pages``: those of all rows, for ``attend``."""
    return pages + (7 + MAX_SHARED) * tokens + 5 * _max_pieces(rows, tokens, tile) + _ROW_WORDS * rows


@function
def _max_pieces(rows: int, tokens: int, tile: int) -> int:
    """Return a bound: a tree of prefixes has fewer forks than leaves; each row's own tokens make tiles and a rest."""
    return 2 * rows + tokens // tile


class PrefixStep(NamedTuple):
    """The rows of a step, and the plan of their tokens."""

    pages: Any
    queries: Any
    contexts: Any
    page_size: int
    first: Any
    """``[tokens]``: the first key that each token reads for itself."""
    pieces: Any
    members: Any
    cost: Any
    """Bytes of a token's keys and values; costs of a piece and of its queries in bytes (``AttentionCostModel``)."""


class PrefixScratch(NamedTuple):
    """Scratch, ``_ROW_WORDS`` words for each row."""

    starts: Any
    """The row's first token."""
    full_pages: Any
    """Number of full pages before its new tokens."""
    own_page: Any
    """The first page that it reads for itself."""
    order: Any
    """All rows; those that share a prefix are neighbours, in ascending order."""
    groups: Any
    """``[rows, 3]``: stack of groups of rows with the same page in a column: their range in ``order``, the column."""


@kernel
def plan_step(address: Any) -> None:
    """Write the step's words that ``attend`` takes, and the arrays that they are addresses of into ``result``.

    Arguments ``(words, result, pages, queries, contexts, trees, depths, masks, scratch, states, rows, tokens, columns,
    blocks, page_size, window, sharing, tile, token_bytes, piece, query, scratch_stride, chunk)``. ``result``:
    ``plan_size`` words.

    The step's tokens are the last ``queries`` ``[rows]`` of ``contexts`` ``[rows]`` tokens in ``pages`` ``[rows,
    columns]``, each of which is ``blocks`` pages for ``attend``. ``trees`` is 0, or ``[rows, 2]``: where in ``masks``
    and ``depths`` a row's tree lies (``engine.attention.plan.TreeMask``), or -1. ``window`` and ``chunk``: see
    ``engine.attention.layer.LayerAttentionConfig``; 0 for none. ``sharing``: 1
    if tokens may read together, at most ``tile`` of one row; ``token_bytes``, ``piece`` and ``query`` decide when that
    is faster (``AttentionCostModel``). ``scratch``, of ``scratch_stride`` floats a thread, and ``states`` are those of
    ``attend``.
    """
    a, _, _ = read_arguments(address)
    rows, tokens, columns, blocks, tile = a[10], a[11], a[12], a[13], a[17]
    queries, contexts, pages = int64_array(a[3], rows), int64_array(a[4], rows), int64_array(a[2], (rows, columns))
    max_pieces = _max_pieces(rows, tokens, tile)
    token_arrays = a[1] + 8 * rows * columns * blocks
    pieces = token_arrays + 48 * tokens
    members = pieces + 40 * max_pieces
    scratch = members + 8 * (1 + MAX_SHARED) * tokens
    attend_pages = int64_array(a[1], (rows, columns, blocks))
    for row in range(rows):
        for column in range(columns):
            for block in range(blocks):
                attend_pages[row, column, block] = pages[row, column] * blocks + block
    arrays = int64_array(token_arrays, (6, tokens))
    trees = int64_array(a[5], (rows if a[5] else 0, 2))
    longest_context = contexts.max()
    window = a[15] if 0 < a[15] < longest_context else 0
    chunk = a[22] if 0 < a[22] < longest_context else 0
    _place_tokens(pages, queries, contexts, a[14], arrays, (trees, a[6]), (window, chunk))
    count, first, end = 0, arrays[1], arrays[2]
    if a[16] and not window and not chunk and tokens > 1:
        piece_arrays = int64_array(pieces, (max_pieces, 5)), int64_array(members, (1 + MAX_SHARED) * tokens)
        step = PrefixStep(
            pages, queries, contexts, a[14], first, piece_arrays[0], piece_arrays[1], (a[18], a[19], a[20])
        )
        lists, groups = int64_array(scratch, (4, rows)), int64_array(scratch + 32 * rows, (rows, 3))
        count = _share_keys(step, PrefixScratch(lists[0], lists[1], lists[2], lists[3], groups), trees, tile)
    longest = 1
    for token in range(tokens):
        longest = max(longest, end[token] - first[token])
    words = int64_array(a[0], STEP_WORDS)
    words[0], words[1], words[7], words[10] = a[8], a[1], a[7], a[9]
    for part in range(5):
        words[2 + part] = token_arrays + 8 * tokens * part
    words[8], words[9], words[16] = pieces, members, token_arrays + 40 * tokens
    words[11], words[12], words[13], words[14], words[15] = tokens, columns * blocks, count, longest, a[21]


@function
def _place_tokens(pages: Any, queries: Any, contexts: Any, size: int, arrays: Any, trees: Any, spans: Any) -> None:
    """Write each token's row, the first and the end of the keys that it sees, its tree, and its slot.

    Until keys are shared, it reads all of them for itself.
    """
    row_of, first, end = arrays[0], arrays[1], arrays[2]
    tree_begin, tree_offset, slots = arrays[3], arrays[4], arrays[5]
    (tree_offsets, depths), (window, chunk), token = trees, spans, 0
    for row in range(len(queries)):
        count, context = queries[row], contexts[row]
        for query in range(count):
            index = position = context - count + query
            slots[token] = pages[row, index // size] * size + index % size
            row_of[token], end[token], tree_begin[token], tree_offset[token] = row, index + 1, 0, -1
            if len(tree_offsets) > 0 and tree_offsets[row, 0] >= 0:
                first_depth = tree_offsets[row, 1]
                position = context - count + int64_array(depths, first_depth + count)[first_depth + query]
                end[token], tree_begin[token] = context, context - count
                tree_offset[token] = tree_offsets[row, 0] + query * count
            first[token] = max(position + 1 - window, 0) if window else 0
            if chunk:
                first[token] = max(first[token], position // chunk * chunk)
            token += 1


@function
def _share_keys(step: Any, scratch: Any, trees: Any, tile: int) -> int:
    """Write the pieces that several tokens read together, and the first key that each reads for itself.

    Returns the number of pieces.
    """
    size, rows, start = step.page_size, len(step.queries), 0
    for row in range(rows):
        scratch.starts[row], scratch.own_page[row], scratch.order[row] = start, 0, row
        scratch.full_pages[row] = (step.contexts[row] - step.queries[row]) // size
        start += step.queries[row]
    pieces, used = share_prefixes(step, scratch)
    for row in range(rows):
        start, count, before = scratch.starts[row], step.queries[row], step.contexts[row] - step.queries[row]
        begin = scratch.own_page[row] * size
        for token in range(start, start + count):
            step.first[token] = begin
        if count == 1:
            continue
        is_tree = len(trees) > 0 and trees[row, 0] >= 0
        step_size = count if is_tree else tile
        for offset in range(0, count, step_size):
            num_tokens, end = min(step_size, count - offset), before + offset
            if not _is_sharing_faster(step.cost, end - begin, num_tokens, num_tokens):
                continue
            _write_piece(step.pieces[pieces], row, begin, end, used, used + num_tokens)
            used = _add_tokens(step.members, start + offset, num_tokens, used)
            pieces += 1
            for token in range(start + offset, start + offset + num_tokens):
                step.first[token] = end
    return pieces


@function
def _is_sharing_faster(cost: Any, tokens: int, rows: int, queries: int) -> bool:
    """Return True if one read for all is faster, as ``AttentionCostModel.should_share``."""
    return (rows - 1) * tokens * cost[0] > cost[1] + cost[2] * queries


@function
def _write_piece(piece: Any, row: int, begin: int, end: int, first_member: int, end_member: int) -> None:
    piece[0], piece[1], piece[2], piece[3], piece[4] = row, begin, end, first_member, end_member


@function
def _add_tokens(members: Any, start: int, count: int, used: int) -> int:
    """Add ``count`` tokens to a piece; return the number of ``members`` used."""
    for token in range(start, start + count):
        members[used] = token
        used += 1
    return used


@function
def share_prefixes(step: Any, scratch: Any) -> Any:
    """Write the pieces of ``engine.attention.plan.find_shared_prefixes``; return the numbers of pieces and members."""
    order, pieces, used, max_members, size = scratch.order, 0, 0, MAX_SHARED * len(step.first), step.page_size
    num_groups = _push_groups(step.pages, scratch, 0, len(order), 0, 0)
    while num_groups:
        num_groups -= 1
        low, high, column = scratch.groups[num_groups, 0], scratch.groups[num_groups, 1], scratch.groups[num_groups, 2]
        split, head = column + 1, order[low]
        limit, queries, begin = scratch.full_pages[head], 0, scratch.own_page[head]
        for index in range(low, high):
            limit, queries = min(limit, scratch.full_pages[order[index]]), queries + step.queries[order[index]]
        while split < limit and _have_same_page(step.pages, order[low:high], split):
            split += 1
        if used + queries <= max_members and _is_sharing_faster(step.cost, (split - begin) * size, high - low, queries):
            _write_piece(step.pieces[pieces], head, begin * size, split * size, used, used + queries)
            for index in range(low, high):
                row = order[index]
                used = _add_tokens(step.members, scratch.starts[row], step.queries[row], used)
                scratch.own_page[row] = split
            pieces += 1
        num_groups = _push_groups(step.pages, scratch, low, high, split, num_groups)
    return pieces, used


@function
def _have_same_page(pages: Any, rows: Any, column: int) -> bool:
    """Return True if all rows have the same page in a column."""
    has_same_page = True
    for row in rows:
        has_same_page &= pages[row, column] == pages[rows[0], column]
    return has_same_page


@function
def _push_groups(pages: Any, scratch: Any, low: int, high: int, column: int, num_groups: int) -> int:
    """Sort a range of ``order`` by the rows' pages in a column, and push its groups of several rows.

    Returns the number of groups on the stack.
    """
    order = scratch.order
    for index in range(low + 1, high):
        row, target = order[index], index
        page = _full_page(pages, scratch, row, column)
        while target > low and _full_page(pages, scratch, order[target - 1], column) > page:
            order[target] = order[target - 1]
            target -= 1
        order[target] = row
    first = low
    for index in range(low, high):
        page = _full_page(pages, scratch, order[index], column)
        if index + 1 == high or _full_page(pages, scratch, order[index + 1], column) != page:
            if index > first and page < _NO_PAGE:
                group = scratch.groups[num_groups]
                group[0], group[1], group[2] = first, index + 1, column
                num_groups += 1
            first = index + 1
    return num_groups


@function
def _full_page(pages: Any, scratch: Any, row: int, column: int) -> int:
    """Return a row's page in a column, ``_NO_PAGE`` if its new tokens begin before the end of that page."""
    return pages[row, column] if scratch.full_pages[row] > column else _NO_PAGE
