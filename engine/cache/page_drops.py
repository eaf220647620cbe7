"""A bound on the keys of a long thought: when it is reached, pages of the thought are dropped at random.

```
pages of a branch  | prompt: stay         | thought: at most so many     | latest of them: stay   | answer: stays
                   0      first_page * page_size                                       end of the thought
```

Whenever the thought has as many pages as the budget has room for, a quarter of them is drawn from those that are not
among its latest half, and dropped. Later tokens do not see them; positions stay. A draw is a function of the seed and
of the thought's tokens, so a replay and every fork drop the same pages, whichever steps compute them. Nothing is
dropped once the thought has ended.

Source: "Random Attention: Rethinking KV Cache Eviction for Efficient Reasoning" (arXiv 2609.03430), which draws tokens
for each head; here whole pages are drawn, for all heads and layers, so that their memory is free.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from hashlib import blake2b

from engine.protocol.request_checks import count_thought_pages
from engine.protocol.types import KeyBound, SamplingParams

_NEVER = 1 << 62
"""Number of tokens that no branch has."""
_WORD = (1 << 64) - 1


def find_key_bound(sampling: SamplingParams, prompt_len: int, seed: int) -> KeyBound | None:
    """Return the bound on the keys of a branch; ``None`` if all are kept."""
    if sampling.kv_budget is None:
        return None
    start = prompt_len if sampling.kv_start is None else sampling.kv_start
    return KeyBound(sampling.kv_budget, start, sampling.kv_end, seed)


class PageDrops:
    """The pages of one branch that are dropped, as far as its tokens are computed."""

    def __init__(self, bound: KeyBound, page_size: int) -> None:
        """``bound``: its seed is the job's, the same for its branches. Raises ``InvalidRequest`` for a budget without
        room."""
        self._start, self._end, self._seed, self._page_size = bound.start, bound.end, bound.seed & _WORD, page_size
        self.first_page = -(-self._start // page_size)
        """Pages of the prompt, which stay, with the one in which it ends."""
        self._max_pages = count_thought_pages(bound.budget, self._start, page_size)
        self._drop = self._max_pages // 4
        self.rule = self._seed, self._start, self._max_pages, self._end
        """Tokens alone decide between branches of the same rule."""
        self.reset()

    def reset(self) -> None:
        """Begin again with a prefix of which nothing is dropped."""
        self._kept = list(range(self.first_page, self.first_page + self._max_pages))
        """The thought's pages that are full at the next drop and not dropped, by their places in the text."""
        self._digests: list[bytes] = []
        """Digests of the thought's tokens up to the end of each of its pages."""
        self._history: list[int] = []
        """The numbers of computed tokens at which pages were dropped."""
        self._has_ended = False
        self._num_searched = self._start

    @classmethod
    def of(cls, bound: KeyBound | None, tokens: Sequence[int], page_size: int) -> PageDrops | None:
        """Return the drops of a branch that arrives with these tokens; ``None`` if nothing of it will be dropped."""
        if bound is None:
            return None
        drops = cls(bound, page_size)
        return None if drops._find_end(tokens, drops._start, drops.first_drop) else drops

    def bound_kept(self, tokens: Sequence[int]) -> int:
        """Return an upper bound of the number of tokens whose pages are kept when all of these are computed."""
        if len(tokens) <= self.first_drop:
            return len(tokens)
        end = self._find_end(tokens, self._start, len(tokens))
        return self.first_drop + self._page_size + (0 if end is None else len(tokens) - end)

    def fork(self) -> PageDrops:
        """Return a copy for a branch that goes on from here."""
        other = copy(self)
        other._kept, other._digests, other._history = list(self._kept), list(self._digests), list(self._history)
        return other

    @property
    def first_drop(self) -> int:
        """Number of tokens up to which no token misses a page, so that their keys may be shared."""
        return (self.first_page + self._max_pages) * self._page_size

    def count_until_next(self, num_computed: int) -> int:
        """Return the number of tokens to compute before pages may have to be dropped."""
        return _NEVER if self._has_ended else (self._kept[-1] + 1) * self._page_size - num_computed

    def take_due(self, tokens: Sequence[int], num_computed: int) -> list[int]:
        """Return the places, in the branch's page table, of the pages to drop before the next token is computed.

        They are dropped then; in descending order.
        """
        if self.count_until_next(num_computed) > 0:
            return []
        if self._ends_before(tokens, num_computed):
            self._has_ended = True
            return []
        self._update_digests(tokens, num_computed)
        old = self._kept[: len(self._kept) - self._max_pages // 2]
        drawn = set(sorted(old, key=self._draw)[: self._drop])
        places = [self.first_page + place for place, page in enumerate(self._kept) if page in drawn]
        following = self._kept[-1] + 1
        self._kept = [page for page in self._kept if page not in drawn]
        self._kept += range(following, following + len(drawn))
        self._history.append(num_computed)
        return places[::-1]

    def count_dropped(self, start: int, end: int) -> int:
        """Return the number of tokens dropped when those from ``start`` to before ``end`` were computed."""
        return sum(start <= position < end for position in self._history) * self._drop * self._page_size

    def _find_end(self, tokens: Sequence[int], first: int, stop: int) -> int | None:
        """Return the place behind the tokens that end the thought, if they are among those from ``first`` to before
        ``stop``."""
        size, last = len(self._end), min(stop, len(tokens)) - len(self._end)
        places = (
            place + size
            for place in range(first, last + 1)
            if tokens[place] == self._end[0] and tuple(tokens[place : place + size]) == self._end
        )
        return next(places, None) if size else None

    def _ends_before(self, tokens: Sequence[int], num_computed: int) -> bool:
        """Return True if the tokens that end a thought are among those that are computed."""
        first = max(self._start, self._num_searched - len(self._end) + 1)
        self._num_searched = num_computed
        return self._find_end(tokens, first, num_computed) is not None

    def _update_digests(self, tokens: Sequence[int], num_computed: int) -> None:
        size = self._page_size
        for page in range(self.first_page + len(self._digests), num_computed // size):
            before = self._digests[-1] if self._digests else self._seed.to_bytes(8, "big")
            own = array("q", tokens[page * size : (page + 1) * size]).tobytes()
            self._digests.append(blake2b(before + own, digest_size=16).digest())

    def _draw(self, page: int) -> bytes:
        """Return the page's random number in the present draw."""
        digest = self._digests[page - self.first_page]
        return blake2b(digest, digest_size=16, salt=len(self._history).to_bytes(16, "big")).digest()
