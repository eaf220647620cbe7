"""The n-gram table of ``kernels.ngrams``: look-ups, additions, and acceptance rates by kind of match."""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.cpu.runtime.kernel import function
from kernels.cpu.simd.vector import prefetch

REACH = 4
"""Tokens of the longest context."""
WIDTH = 5
"""Followers of a context that are kept: of the rarest ones the oldest goes first."""
WAYS = 8
"""Places that a context may lie at."""
RECORD = 1 + 3 * WIDTH
"""Words of a record: how often the context came, and its followers' tokens, counts and searches, the latest first. A
count of 0 ends them."""
_LIFE = 1 << 10
"""Occurrences after which older ones count half, of contexts and in rates."""
_PRIME, _HIGH, _LOW = (1 << 31) - 1, 1_583_458_089, 784_588_716
_MASK = (1 << 31) - 1

_OFTEN, _FEW, _STATES = 9, 4, 3
"""Kinds of matches, for each length: by the bits of their occurrences, of the number of their followers, and by what
the search knows: nothing, that it wrote the likeliest follower too, or only others."""
_KINDS = REACH * _OFTEN * _FEW * _STATES
_SELDOM = 5
"""Kinds of the last follower that the search itself wrote, for each length, by the bits of its count."""
RATES = _KINDS + REACH * _SELDOM


class Table(NamedTuple):
    keys: Any
    """int64, -1 where nothing lies."""
    used: Any
    """int64, when something was last added there."""
    records: Any
    """int32, ``RECORD`` for each key."""
    rates: Any
    """float64: how often something was so, and of how many cases, for each of ``RATES`` kinds."""
    read: Any
    """int64, texts that were read to here."""
    clock: Any
    """int64, one number: tokens that were read."""
    branches: Any
    """int64: what is known of branches, see ``kernels.cpu.ngrams.match``."""


@function
def ask(array: Any, place: int) -> None:
    """Asks for the cache line at a place, which will be read soon."""
    prefetch(array.ctypes.data + array.itemsize * place)


@function
def mix(state: int, token: int) -> int:
    """Two polynomials modulo a prime of 31 bits: the hash of a text that is one token longer."""
    return ((state >> 31) * _HIGH + token) % _PRIME << 31 | ((state & _MASK) * _LOW + token) % _PRIME


@function
def _set_of(keys: Any, key: int) -> int:
    return (key & (len(keys) // WAYS - 1)) * WAYS


@function
def _bits(count: int, most: int) -> int:
    bits = 0
    while count > 0 and bits < most:
        count >>= 1
        bits += 1
    return bits


@function
def contexts_of(table: Any, scope: int, window: Any, before: int, contexts: Any) -> None:
    """Writes the contexts that end the ``window`` ``[REACH]`` and lie within its last ``before`` tokens, the shortest
    first. They are looked up soon."""
    state = scope
    for length in range(before):
        state = mix(state, window[REACH - 1 - length])
        contexts[length] = state
        ask(table.keys, _set_of(table.keys, state))


@function
def longest(table: Any, contexts: Any, count: int) -> Any:
    """The record of the longest known one of so many contexts, and its length; -1 and 0 for none. It is read soon."""
    found, length = -1, 0
    while length < count:
        first = _set_of(table.keys, contexts[length])
        place = first
        while place < first + WAYS and table.keys[place] != contexts[length]:
            place += 1
        if place == first + WAYS:
            break
        found, length = place * RECORD, length + 1
    if found >= 0:
        ask(table.records, found)
    return found, length


@function
def ask_for(table: Any, contexts: Any, count: int) -> None:
    """Something is added to so many contexts soon."""
    for length in range(count):
        first = _set_of(table.keys, contexts[length])
        ask(table.keys, first)
        ask(table.used, first)


@function
def ask_for_records(table: Any, contexts: Any, count: int) -> None:
    """Something is added to so many contexts now."""
    for length in range(count):
        first = _set_of(table.keys, contexts[length])
        for place in range(first, first + WAYS):
            if table.keys[place] == contexts[length]:
                ask(table.records, place * RECORD)


@function
def add(table: Any, key: int, token: int, search: int) -> None:
    """The token followed a context."""
    keys, used, records = table.keys, table.used, table.records
    first = _set_of(keys, key)
    place = first
    for other in range(first, first + WAYS):
        if keys[other] == key:
            place = other
            break
        if used[other] < used[place]:
            place = other
    record = place * RECORD
    if keys[place] != key:
        keys[place] = key
        records[record] = 0
        for slot in range(WIDTH):
            records[record + 2 + 3 * slot] = 0
    used[place] = table.clock[0]
    slot, count = 0, 0
    for other in range(WIDTH):
        times = records[record + 2 + 3 * other]
        if times == 0 or records[record + 1 + 3 * other] == token:
            slot, count = other, times
            break
        if times <= records[record + 2 + 3 * slot]:
            slot = other
    for word in range(record + 3 + 3 * slot, record + 3, -1):
        records[word] = records[word - 3]
    records[record] += 1
    records[record + 1], records[record + 2], records[record + 3] = token, count + 1, search
    if records[record] == _LIFE:
        records[record] //= 2
        for slot in range(WIDTH):
            records[record + 2 + 3 * slot] = (records[record + 2 + 3 * slot] + 1) // 2


@function
def kind_of(records: Any, record: int, length: int, search: int) -> Any:
    """The kind of a match, how many followers it has, which is the likeliest, the kind of the last one that the search
    wrote, and which that is: -1 if it wrote none, or the likeliest."""
    count, best, own = 0, 0, -1
    while count < WIDTH and records[record + 2 + 3 * count] > 0:
        if records[record + 2 + 3 * count] > records[record + 2 + 3 * best]:
            best = count
        if own < 0 and records[record + 3 + 3 * count] == search:
            own = count
        count += 1
    state = 0
    if own >= 0:
        state = 2
        if records[record + 3 + 3 * best] == search:
            state, own = 1, -1
    often = _bits(records[record], _OFTEN - 1)
    kind = (((length - 1) * _OFTEN + often) * _FEW + _bits(count, _FEW - 1)) * _STATES + state
    times = _bits(records[record + 2 + 3 * own], _SELDOM - 1) if own >= 0 else 0
    return kind, count, best, _KINDS + (length - 1) * _SELDOM + times, own


@function
def rate(rates: Any, kind: int, was: bool) -> None:
    """Something of a kind was so, or was not."""
    if rates[2 * kind + 1] >= _LIFE:
        rates[2 * kind] /= 2
        rates[2 * kind + 1] /= 2
    rates[2 * kind] += was
    rates[2 * kind + 1] += 1


@function
def was_read(table: Any, text: int) -> bool:
    """Whether a text was read."""
    first = _set_of(table.read, text)
    place = first
    while place < first + WAYS and table.read[place] != text:
        place += 1
    return place < first + WAYS


@function
def read(table: Any, text: int) -> bool:
    """Whether a text was read; it is now."""
    first = _set_of(table.read, text)
    taken = first + table.clock[0] % WAYS
    for place in range(first, first + WAYS):
        if table.read[place] == text:
            return True
        if table.read[place] < 0:
            taken = place
            break
    table.read[taken] = text
    return False


@function
def ask_for_text(table: Any, text: int) -> None:
    """A text is read soon."""
    ask(table.read, _set_of(table.read, text))
