"""The hash table of ``kernels.ngrams``: look-ups, additions, and hit rates by kind of match.

A context is a hash of as many tokens as one of the table's ``lengths``. It lies in one of ``WAYS`` neighbouring slots,
which share a cache line of keys. Each slot has a record of what followed the context::

    word    0            1  2  3           4  5  6           …
            occurrences  token count search of the latest follower, then of the one before it, …

A count of 0 ends the followers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.cpu.runtime.kernel import function
from kernels.cpu.simd.vector import prefetch

MAX_CONTEXT = 12
"""Tokens of the longest context."""
NUM_LENGTHS = 6
"""Maximum number of lengths of contexts."""
NO_LENGTH = 1 << 30
"""Stands for no further length."""
MAX_FOLLOWERS = 5
"""Followers of a context that are kept: among the rarest ones the oldest is replaced first."""
WAYS = 8
"""Slots that a context may lie in."""
RECORD_WORDS = 1 + 3 * MAX_FOLLOWERS

_MAX_COUNT = 1 << 10
"""Occurrences of a context, and cases of a rate, after which the older ones count half."""
_PRIME, _HIGH, _LOW = (1 << 31) - 1, 1_583_458_089, 784_588_716
_MASK = (1 << 31) - 1

_OCCURRENCE_BINS, _FOLLOWER_BINS, _SEARCH_STATES = 9, 4, 3
"""Kinds of matches of each context length: by the bits of the number of occurrences and of the number of followers, and
by which followers the same search wrote: none, the likeliest, or only others."""
_MATCH_KINDS = NUM_LENGTHS * _OCCURRENCE_BINS * _FOLLOWER_BINS * _SEARCH_STATES
_COUNT_BINS = 5
"""Kinds of followers that the same search wrote, of each context length: by the bits of their count."""
NUM_KINDS = _MATCH_KINDS + NUM_LENGTHS * _COUNT_BINS


class Table(NamedTuple):
    """The arrays of a table."""

    keys: Any
    """int64 ``[slots]``: hash of the context, -1 if the slot is empty."""
    last_used: Any
    """int64 ``[slots]``: the clock when the slot was last added to."""
    records: Any
    """int32 ``[slots * RECORD_WORDS]``."""
    rates: Any
    """float64 ``[2 * NUM_KINDS]``: hits and cases of each kind."""
    texts: Any
    """int64: hashes of texts that were read from their beginning, -1 if empty."""
    clock: Any
    """int64 ``[1]``: number of tokens read."""
    lengths: Any
    """int64 ``[NUM_LENGTHS + 1]``: numbers of tokens of contexts, ascending, the rest ``NO_LENGTH``."""
    noise: Any
    """float64 ``[1]``: weight of the noise."""
    branches: Any
    """int64: the state of each branch, ``kernels.cpu.ngrams.match.BRANCH_WORDS`` words."""


@function
def follower_token(record: int, index: int) -> int:
    """Return the word that holds the token of a record's follower."""
    return record + 1 + 3 * index


@function
def follower_count(record: int, index: int) -> int:
    """Return the word that holds the number of times that the token followed."""
    return record + 2 + 3 * index


@function
def follower_search(record: int, index: int) -> int:
    """Return the word that holds the search that wrote the follower last."""
    return record + 3 + 3 * index


@function
def extend_hash(text: int, token: int) -> int:
    """Return the hash of a text that is one token longer: two polynomials modulo a prime of 31 bits."""
    return ((text >> 31) * _HIGH + token) % _PRIME << 31 | ((text & _MASK) * _LOW + token) % _PRIME


@function
def _first_way(keys: Any, key: int) -> int:
    """Return the first of the ``WAYS`` slots of a key."""
    return (key & (len(keys) // WAYS - 1)) * WAYS


@function
def _find_way(keys: Any, key: int) -> int:
    """Return the slot of a key, -1 if there is none."""
    first = _first_way(keys, key)
    for slot in range(first, first + WAYS):
        if keys[slot] == key:
            return slot
    return -1


@function
def _bit_length(count: int, limit: int) -> int:
    """Return the number of bits of a count, at most ``limit``."""
    bits = 0
    while count > 0 and bits < limit:
        count >>= 1
        bits += 1
    return bits


@function
def _prefetch_item(array: Any, index: int) -> None:
    prefetch(array.ctypes.data + array.itemsize * index)


@function
def hash_contexts(table: Any, scope: int, window: Any, num_tokens: int, contexts: Any) -> int:
    """Write the hashes of the contexts that end the ``window`` ``[MAX_CONTEXT]``, shortest first; return their number.

    ``num_tokens``: number of tokens of the text, of which the window holds the last. Prefetches the contexts' keys.
    """
    context, count = scope, 0
    for back in range(1, min(num_tokens, MAX_CONTEXT) + 1):
        context = extend_hash(context, window[MAX_CONTEXT - back])
        if back == table.lengths[count]:
            contexts[count] = context
            count += 1
            _prefetch_item(table.keys, _first_way(table.keys, context))
    return count


@function
def find_longest(table: Any, contexts: Any, count: int) -> Any:
    """Return the record of the longest of ``count`` contexts that is in the table, and its index among them; -1 and -1
    if none is.

    Prefetches the record.
    """
    record, index = -1, -1
    while index + 1 < count:
        slot = _find_way(table.keys, contexts[index + 1])
        if slot < 0:
            break
        record, index = slot * RECORD_WORDS, index + 1
    if record >= 0:
        _prefetch_item(table.records, record)
    return record, index


@function
def prefetch_slots(table: Any, contexts: Any, count: int) -> None:
    """Prefetch the slots of ``count`` contexts that are added to soon."""
    for index in range(count):
        first = _first_way(table.keys, contexts[index])
        _prefetch_item(table.keys, first)
        _prefetch_item(table.last_used, first)


@function
def prefetch_records(table: Any, contexts: Any, count: int) -> None:
    """Prefetch the records of ``count`` contexts, whose slots were prefetched before."""
    for index in range(count):
        slot = _find_way(table.keys, contexts[index])
        if slot >= 0:
            _prefetch_item(table.records, slot * RECORD_WORDS)


@function
def prefetch_text(table: Any, text: int) -> None:
    """Prefetch the slots of a text that is looked up soon."""
    _prefetch_item(table.texts, _first_way(table.texts, text))


@function
def add_follower(table: Any, context: int, token: int, search: int) -> None:
    """Count that a token followed a context. A new context takes the slot of the one that was used longest ago."""
    keys, last_used, records = table.keys, table.last_used, table.records
    first = _first_way(keys, context)
    slot = first
    for way in range(first, first + WAYS):
        if keys[way] == context:
            slot = way
            break
        if last_used[way] < last_used[slot]:
            slot = way
    record = slot * RECORD_WORDS
    if keys[slot] != context:
        keys[slot] = context
        records[record] = 0
        for index in range(MAX_FOLLOWERS):
            records[follower_count(record, index)] = 0
    last_used[slot] = table.clock[0]
    # The entry of the token, or a free one, or the oldest of the rarest ones.
    chosen, count = 0, 0
    for index in range(MAX_FOLLOWERS):
        times = records[follower_count(record, index)]
        if times == 0 or records[follower_token(record, index)] == token:
            chosen, count = index, times
            break
        if times <= records[follower_count(record, chosen)]:
            chosen = index
    # The latest follower comes first: those before the chosen one move up.
    for word in range(follower_search(record, chosen), follower_search(record, 0), -1):
        records[word] = records[word - 3]
    records[record] += 1
    records[follower_token(record, 0)], records[follower_count(record, 0)] = token, count + 1
    records[follower_search(record, 0)] = search
    if records[record] == _MAX_COUNT:
        records[record] //= 2
        for index in range(MAX_FOLLOWERS):
            records[follower_count(record, index)] = (records[follower_count(record, index)] + 1) // 2


@function
def classify_match(records: Any, record: int, length_index: int, search: int) -> Any:
    """Return the kind of a match, its number of followers, and two values of the search.

    ``length_index``: index of the context's length. The values of the search are the kind and the index of the last
    follower that the search itself wrote; the index is -1 if it wrote none, or the most frequent too.
    """
    count, best, own = 0, 0, -1
    while count < MAX_FOLLOWERS and records[follower_count(record, count)] > 0:
        if records[follower_count(record, count)] > records[follower_count(record, best)]:
            best = count
        if own < 0 and records[follower_search(record, count)] == search:
            own = count
        count += 1
    state = 0
    if own >= 0:
        state = 2
        if records[follower_search(record, best)] == search:
            state, own = 1, -1
    occurrences = _bit_length(records[record], _OCCURRENCE_BINS - 1)
    followers = _bit_length(count, _FOLLOWER_BINS - 1)
    kind = ((length_index * _OCCURRENCE_BINS + occurrences) * _FOLLOWER_BINS + followers) * _SEARCH_STATES + state
    times = _bit_length(records[follower_count(record, own)], _COUNT_BINS - 1) if own >= 0 else 0
    return kind, count, _MATCH_KINDS + length_index * _COUNT_BINS + times, own


@function
def update_rate(rates: Any, kind: int, is_hit: bool) -> None:
    """Count one more case of a kind."""
    if rates[2 * kind + 1] >= _MAX_COUNT:
        rates[2 * kind] /= 2
        rates[2 * kind + 1] /= 2
    rates[2 * kind] += is_hit
    rates[2 * kind + 1] += 1


@function
def hit_rate(rates: Any, kind: int) -> float:
    """Return the share of the cases of a kind that were hits."""
    return rates[2 * kind] / rates[2 * kind + 1]


@function
def has_text(table: Any, text: int) -> bool:
    """Return True if a text was read."""
    return _find_way(table.texts, text) >= 0


@function
def add_text(table: Any, text: int) -> bool:
    """Record that a text was read; return True if it was read before."""
    first = _first_way(table.texts, text)
    chosen = first + table.clock[0] % WAYS
    for slot in range(first, first + WAYS):
        if table.texts[slot] == text:
            return True
        if table.texts[slot] < 0:
            chosen = slot
            break
    table.texts[chosen] = text
    return False
