"""Learning from the new tokens of many branches and proposing draft tokens for them, in one call.

``kernels.ngrams`` describes the table and the method.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from kernels.common.noise import SAMPLE
from kernels.cpu.ngrams.table import (
    MAX_CONTEXT,
    MAX_FOLLOWERS,
    NUM_KINDS,
    NUM_LENGTHS,
    RECORD_WORDS,
    Table,
    add_follower,
    add_text,
    classify_match,
    extend_hash,
    find_longest,
    follower_count,
    follower_token,
    has_text,
    hash_contexts,
    hit_rate,
    prefetch_records,
    prefetch_slots,
    prefetch_text,
    update_rate,
)
from kernels.cpu.runtime.kernel import as_float, float32_array, function, int64_array, kernel, read_arguments
from kernels.cpu.sampling.noise import gumbel_noise, noise_stream

_ROW_WORDS, _NEW_BRANCH_WORDS = 4, 7
"""Words of a row before its tokens, and the words of a new branch that come before these too."""
_START, _PREFETCH, _LEARN, _MATCH = 0, 1, 2, 3
"""Passes over all rows before the one that proposes."""

# The state of a branch: a word for each of these, …
_SCOPE = 0
_SEARCH = 1
_TEXT = 2
"""Hash of the tokens read so far."""
_LENGTH = 3
"""Number of tokens read so far."""
_KIND = 4
"""Kind of the match whose followers the next token is compared with; -1: none."""
_NUM_FOLLOWERS = 5
"""Number of these followers."""
_OWN_KIND = 6
"""Kind of the follower that the search itself wrote; -1: none."""
_OWN_TOKEN = 7
_RECORD = 8
"""Record of the longest context in the table, and the index of its length."""
_RECORD_LENGTH = 9
_SEED = 10
"""Seed and key of the branch's sampling noise."""
_KEY = 11
_FIRST_POSITION = 12
"""Position of the first token read."""
_IS_SAMPLED = 13
"""1 if tokens are sampled with noise, 0 if greedily."""
# … and then the last tokens, the hashes of the contexts that they make, and the followers to compare with.
_LAST = 14
_CONTEXTS = _LAST + MAX_CONTEXT
_FOLLOWERS = _CONTEXTS + NUM_LENGTHS
BRANCH_WORDS = _FOLLOWERS + MAX_FOLLOWERS
"""Words of a branch's state."""


class _Row(NamedTuple):
    """One row of the input: a branch with its new tokens, and how many draft tokens it may get."""

    branch: Any
    """The branch's state, ``[BRANCH_WORDS]``."""
    is_new: bool
    first: int
    """Index of its first token."""
    num_tokens: int
    num_prefix: int
    """Number of tokens of a new branch that come from a prefix."""
    depth: int
    nodes: int


class _Candidates(NamedTuple):
    """Draft tokens that may follow the tree so far, unordered."""

    tokens: Any
    parents: Any
    probs: Any
    """Probability that the token is accepted if its parent is."""
    path_probs: Any
    """Probability that the token and all before it are accepted; 0 once the token is in the tree."""


class _Tree(NamedTuple):
    """The draft tokens of one branch."""

    tokens: Any
    parents: Any
    probs: Any
    depths: Any


@function
def _read_row(table: Any, words: Any, start: int) -> Any:
    slot, count, depth, nodes = words[start], words[start + 1], words[start + 2], words[start + 3]
    is_new, first, num_prefix = slot < 0, start + _ROW_WORDS, 0
    if is_new:
        slot, num_prefix = ~slot, words[start + _ROW_WORDS + 2]
        first += _NEW_BRANCH_WORDS
    branch = table.branches[slot * BRANCH_WORDS : (slot + 1) * BRANCH_WORDS]
    return _Row(branch, is_new, first, count, num_prefix, depth, nodes)


@function
def _num_contexts(table: Any, branch: Any) -> int:
    count = 0
    while table.lengths[count] <= branch[_LENGTH]:
        count += 1
    return count


@function
def _update_rates(rates: Any, branch: Any, token: int) -> None:
    """Compare a sampled token with the followers that were known when drafts were last requested."""
    if branch[_KIND] >= 0:
        is_hit = False
        for index in range(branch[_NUM_FOLLOWERS]):
            is_hit = is_hit or branch[_FOLLOWERS + index] == token
        update_rate(rates, branch[_KIND], is_hit)
        if branch[_OWN_KIND] >= 0:
            update_rate(rates, branch[_OWN_KIND], branch[_OWN_TOKEN] == token)
    branch[_KIND] = -1


@function
def _learn(table: Any, branch: Any, words: Any, first: int, count: int, num_prefix: int) -> None:
    """Read the next ``count`` tokens of a branch, of which the first ``num_prefix`` come from a prefix."""
    last = branch[_LAST:_CONTEXTS]
    text, length, start = branch[_TEXT], branch[_LENGTH], 0
    if num_prefix > 0:
        prefix = text
        for i in range(num_prefix):
            prefix = extend_hash(prefix, words[first + i])
        if has_text(table, prefix):
            # Then all of its beginnings were read too.
            text, start = prefix, num_prefix
            for i in range(min(num_prefix, MAX_CONTEXT)):
                last[MAX_CONTEXT - 1 - i] = words[first + num_prefix - 1 - i]
    for i in range(start, count):
        token = words[first + i]
        text = extend_hash(text, token)
        table.clock[0] += 1
        # Each sampled token counts, the tokens of a prefix only once.
        if not add_text(table, text) or i >= num_prefix:
            context, rank = branch[_SCOPE], 0
            for back in range(1, min(length + i, MAX_CONTEXT) + 1):
                context = extend_hash(context, last[MAX_CONTEXT - back])
                if back == table.lengths[rank]:
                    rank += 1
                    add_follower(table, context, token, branch[_SEARCH])
        for index in range(MAX_CONTEXT - 1):
            last[index] = last[index + 1]
        last[MAX_CONTEXT - 1] = token
    branch[_TEXT], branch[_LENGTH] = text, length + count
    hash_contexts(table, branch[_SCOPE], last, length + count, branch[_CONTEXTS:_FOLLOWERS])


@function
def _weigh_followers(table: Any, branch: Any, ahead: int, record: int, count: int, weights: Any) -> float:
    """Write the weight of each follower, and return their sum.

    It is the number of times that the token followed, times a factor for the noise that the branch samples it with.
    ``ahead``: number of draft tokens before it.
    """
    records, total, position = table.records, 0.0, branch[_FIRST_POSITION] + branch[_LENGTH] + ahead
    stream = noise_stream(branch[_SEED], branch[_KEY], position, SAMPLE)
    for index in range(count):
        weight = float(records[follower_count(record, index)])
        if branch[_IS_SAMPLED] and count > 1:
            weight *= math.exp(table.noise[0] * gumbel_noise(stream, records[follower_token(record, index)]))
        weights[index] = weight
        total += weight
    return total


@function
def _expand(
    table: Any,
    branch: Any,
    match: Any,
    candidates: Any,
    size: int,
    parent: int,
    ahead: int,
    path_prob: float,
    is_chain: bool,
    min_prob: float,
) -> int:
    """Append the followers of a match to the ``size`` candidates, for a chain only the likeliest; return the new size.

    ``ahead``, ``path_prob``: number of draft tokens up to ``parent``, and probability that all of them are accepted.
    Followers whose own is below ``min_prob`` are left out. The followers of the root are noted in the branch's state
    (``_update_rates``).
    """
    record, length_index = match
    records, rates = table.records, table.rates
    kind, num_followers, own_kind, own = classify_match(records, record, length_index, branch[_SEARCH])
    if parent < 0:
        branch[_KIND], branch[_NUM_FOLLOWERS], branch[_OWN_KIND] = kind, num_followers, -1
        for index in range(num_followers):
            branch[_FOLLOWERS + index] = records[follower_token(record, index)]
        if own >= 0:
            branch[_OWN_KIND], branch[_OWN_TOKEN] = own_kind, records[follower_token(record, own)]
    probs = candidates.probs[size : size + num_followers]
    total = _weigh_followers(table, branch, ahead, record, num_followers, probs)
    scale, best = hit_rate(rates, kind) / total, 0
    for index in range(num_followers):
        probs[index] *= scale
        if index == own:
            probs[index] = max(probs[index], hit_rate(rates, own_kind))
        if probs[index] > probs[best]:
            best = index
    first, end = (best, best + 1) if is_chain else (0, num_followers)
    for index in range(first, end):
        prob = probs[index]
        if path_prob * prob >= min_prob:
            candidates.tokens[size], candidates.parents[size] = records[follower_token(record, index)], parent
            candidates.probs[size], candidates.path_probs[size] = prob, path_prob * prob
            size += 1
    return size


@function
def _match_node(table: Any, branch: Any, tree: Any, node: int, window: Any) -> Any:
    """Return the longest match of the tokens up to a node of the tree, and its length. ``window``: scratch."""
    up, index = node, MAX_CONTEXT
    while index > 0 and up >= 0:
        index -= 1
        window[index], up = tree.tokens[up], tree.parents[up]
    # Before the tree come the branch's last tokens, which end where its contexts begin.
    for back in range(index):
        window[back] = branch[_CONTEXTS - index + back]
    count = hash_contexts(table, branch[_SCOPE], window, branch[_LENGTH] + tree.depths[node], window[MAX_CONTEXT:])
    return find_longest(table, window[MAX_CONTEXT:], count)


@function
def _propose(
    table: Any, branch: Any, depth: int, nodes: int, min_prob: float, tree: Any, candidates: Any, window: Any
) -> int:
    """Grow a tree of at most ``nodes`` tokens, always by the candidate likeliest to be accepted; return its size."""
    node, path_prob, count, size = -1, 1.0, 0, 0
    while count < nodes:
        if node < 0 or tree.depths[node] < depth:
            match = branch[_RECORD], branch[_RECORD_LENGTH]
            if node >= 0:
                match = _match_node(table, branch, tree, node, window)
            if match[0] >= 0:
                ahead = tree.depths[node] if node >= 0 else 0
                size = _expand(table, branch, match, candidates, size, node, ahead, path_prob, depth == nodes, min_prob)
        best, best_prob = -1, 0.0
        for index in range(size):
            if candidates.path_probs[index] > best_prob:
                best, best_prob = index, candidates.path_probs[index]
        if best < 0:
            break
        node, count = count, count + 1
        parent = candidates.parents[best]
        tree.tokens[node], tree.parents[node], tree.probs[node] = (
            candidates.tokens[best],
            parent,
            candidates.probs[best],
        )
        tree.depths[node] = 1 + (tree.depths[parent] if parent >= 0 else 0)
        path_prob, candidates.path_probs[best] = best_prob, 0.0
    return count


@function
def _run_pass(table: Any, words: Any, rows: int, phase: int) -> None:
    """Run one of the passes before the last over all rows: start new branches and compare the next tokens of the others
    with what was known; prefetch the records that each branch's first token is added to; learn; match."""
    start = 0
    for _ in range(rows):
        row = _read_row(table, words, start)
        branch, contexts = row.branch, row.branch[_CONTEXTS:_FOLLOWERS]
        start = row.first + row.num_tokens
        if phase == _MATCH:
            branch[_RECORD], branch[_RECORD_LENGTH] = find_longest(table, contexts, _num_contexts(table, branch))
        elif phase == _START and row.is_new:
            scope, search = words[row.first - _NEW_BRANCH_WORDS], words[row.first - _NEW_BRANCH_WORDS + 1]
            branch[_SCOPE], branch[_SEARCH], branch[_TEXT] = scope, search, scope
            branch[_LENGTH], branch[_KIND] = 0, -1
            branch[_SEED : _SEED + 4] = words[row.first - 4 : row.first]
        elif row.num_tokens > 0 and phase == _START:
            _update_rates(table.rates, branch, words[row.first])
            prefetch_slots(table, contexts, _num_contexts(table, branch))
        elif row.num_tokens > 0 and phase == _PREFETCH:
            prefetch_records(table, contexts, _num_contexts(table, branch))
            prefetch_text(table, extend_hash(branch[_TEXT], words[row.first]))
        elif row.num_tokens > 0:
            _learn(table, branch, words, row.first, row.num_tokens, row.num_prefix)


@function
def _propose_for_branches(
    table: Any, words: Any, rows: int, max_total: int, max_nodes: int, min_prob: float, ints: Any, floats: Any
) -> None:
    """Write the number of draft tokens of each row, and their tokens, parents and probabilities."""
    max_candidates, offset = (max_nodes + 1) * MAX_FOLLOWERS, rows + 2 * max_total
    depths, offset = ints[offset : offset + max_nodes], offset + max_nodes
    window, offset = ints[offset : offset + MAX_CONTEXT + NUM_LENGTHS], offset + MAX_CONTEXT + NUM_LENGTHS
    candidates = _Candidates(
        ints[offset : offset + max_candidates],
        ints[offset + max_candidates : offset + 2 * max_candidates],
        floats[max_total : max_total + max_candidates],
        floats[max_total + max_candidates : max_total + 2 * max_candidates],
    )
    start, done = 0, 0
    for index in range(rows):
        row = _read_row(table, words, start)
        tree = _Tree(ints[rows + done :], ints[rows + max_total + done :], floats[done:], depths)
        ints[index] = _propose(table, row.branch, row.depth, row.nodes, min_prob, tree, candidates, window)
        done += ints[index]
        start = row.first + row.num_tokens


def scratch_sizes(rows: int, max_total: int, max_nodes: int) -> tuple[int, int]:
    """Return the sizes of the ``ints`` and ``floats`` that ``learn_and_propose`` needs."""
    max_candidates = (max_nodes + 1) * MAX_FOLLOWERS
    return (
        rows + 2 * max_total + max_nodes + MAX_CONTEXT + NUM_LENGTHS + 2 * max_candidates,
        max_total + 2 * max_candidates,
    )


@kernel
def learn_and_propose(address: Any) -> None:
    """Arguments ``(pointers, words, num_words, rows, max_total, max_nodes, min_prob)``, see ``NgramTable``.

    ``pointers``: addresses of the arrays of the ``Table``; the number of slots, of texts, of words of branches, of
    ``ints`` and of ``floats``; the addresses of ``ints`` and ``floats``. ``ints`` gets the number of draft tokens of
    each row, ``[rows]``, their tokens and their parents, ``[max_total]`` each, and ``floats`` their probabilities; the
    rest of both is scratch (``scratch_sizes``).

    All rows go through five passes, so that memory is prefetched one pass before it is read, and all tokens are learned
    before any are proposed.
    """
    a, _, _ = read_arguments(address)
    pointers = int64_array(a[0], (16,))
    slots, num_texts, branch_words = pointers[9], pointers[10], pointers[11]
    num_ints, num_floats = pointers[12], pointers[13]
    table = Table(
        int64_array(pointers[0], (slots,)),
        int64_array(pointers[1], (slots,)),
        float32_array(pointers[2], (slots * RECORD_WORDS,)).view(np.int32),
        int64_array(pointers[3], (2 * NUM_KINDS,)).view(np.float64),
        int64_array(pointers[4], (num_texts,)),
        int64_array(pointers[5], (1,)),
        int64_array(pointers[6], (NUM_LENGTHS + 1,)),
        int64_array(pointers[7], (1,)).view(np.float64),
        int64_array(pointers[8], (branch_words,)),
    )
    ints, floats = int64_array(pointers[14], (num_ints,)), int64_array(pointers[15], (num_floats,)).view(np.float64)
    words, rows = int64_array(a[1], (a[2],)), a[3]
    for phase in range(_MATCH + 1):
        _run_pass(table, words, rows, phase)
    _propose_for_branches(table, words, rows, a[4], a[5], as_float(a[6]), ints, floats)
