"""Prompt lookup: what followed the same tokens before, in a branch's own text or in another text of its search.

Texts are shared by the requests that name one lease in one namespace, and by the branches of one request otherwise.
The longest suffix that was seen before decides; its followers are ranked by how often they came, then by how lately.

**Chances.** How much a match is worth depends on the model, the temperature and the text: a lone match of one token in
the prompt is right one time in six on Countdown and hardly ever on word problems, most matches in what siblings wrote
before are right. So it is measured, for each length of match and each number of occurrences and of different followers:
how often the token that was drawn was among the followers (the complement of the escape probability of prediction by
partial matching; Cleary, Witten, "Data compression using adaptive coding and partial string matching", 1984). A
follower's chance is that rate times its share of the occurrences. What a step drew is compared with what was known
before the step, as guesses are: a sibling that is one token ahead in the same step was no help.

**Cost.** Each token is indexed once: those that a branch draws when it draws them, those that it starts with only as
far as no text of its search has them. A step costs a few look-ups in dicts for each new token and each guess, however
long the texts are, and next to nothing where nobody wants guesses: what was written meanwhile is read little by little
when somebody does.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter

from torch import Tensor

from engine.cache.kv import KVCache
from engine.sequence import GenerateSequence, Job
from engine.speculation.draft import EMPTY, Advance, Draft, Watch, Wish
from engine.speculation.suffix_index import REACH, Match, Place, Stretch, SuffixIndex, Window, window

_SIZE = 1 << 18
"""Suffixes and tokens that are kept in all: about 40 MiB, a twenty-fifth of the default cache."""

_SEARCH_SIZE = _SIZE // 4
"""Suffixes that one search may have, so that no search drives all others out: 16,000 tokens that never repeat."""

_SEARCH_TEXT = _SEARCH_SIZE // 2
"""Tokens of a search after which it forgets which prefixes were read; those that come again are indexed again."""

_SEARCHES = 1024
"""Searches that are remembered while none of their branches runs."""

_PREFIX = 2048
"""Of a longer prefix the last one to two times as many tokens are indexed: a quarter of a search's suffixes at most."""

_READ = 128
"""Tokens that are read, when there are guesses to be made, of branches for which nobody wants any. While the controller
asks for none, as with many branches at once, nothing is read."""

_BACKLOG = 256
"""Branches with unread tokens that are remembered, those that are over among them."""

_MEMORY = 1024
"""Draws after which older ones of the same kind count half."""

_Key = tuple[str | None, str] | Job
"""A namespace and a lease, or a request without a lease."""


@dataclass(eq=False, slots=True)
class _Search:
    """What is remembered of texts that help each other."""

    key: _Key
    index: SuffixIndex = field(default_factory=lambda: SuffixIndex(_SEARCH_SIZE))
    texts: Stretch = field(default_factory=Stretch)
    tokens: int = 0
    """In ``texts``, at most."""
    branches: int = 0
    """Those that are not over."""

    @property
    def size(self) -> int:
        """Suffixes and tokens."""
        return len(self.index) + self.tokens

    def shrink(self, count: int) -> None:
        """Forgets what was read, and suffixes if that is less than ``count``."""
        self.index.shrink(min(max(0, count - self.tokens), len(self.index)))
        self.texts, self.tokens = Stretch(), 0


@dataclass(eq=False, slots=True)
class _Branch:
    search: _Search
    sequence: GenerateSequence
    done: int
    """Its tokens up to here are indexed, or were so before it came."""
    place: Place | None
    """The same point in the search's texts, unless the search has forgotten them since."""

    @property
    def left(self) -> int:
        """Tokens that are to be indexed."""
        return len(self.sequence.tokens) - self.done

    def read(self, most: int) -> int:
        """Indexes its next ``most`` tokens, but for those of its prefix that its search has read by now; answers how
        many."""
        search, tokens, prefix = self.search, self.sequence.tokens, self.sequence.prefix
        if self.place is not None and self.place.start is not search.texts:
            self.place = None
        place = self.place
        if place is not None and self.done < prefix:
            self.done += place.pass_by(tokens[self.done : prefix])
        before = window(tokens, self.done)
        news = tokens[self.done : self.done + most]
        for token in news:
            search.index.add(before, token)
            if place is not None:
                place.read(token)
            before = (*before, token)[-REACH:]
        self.done += len(news)
        search.tokens += 0 if place is None else len(news)
        if search.tokens > _SEARCH_TEXT:
            search.shrink(0)
        return len(news)


class NgramDrafter:
    """See ``Drafter``."""

    kind = "ngram"
    layers = 0
    watches = Watch.NONE

    def __init__(self) -> None:
        self._forget_all()

    def reset(self, cache: KVCache) -> None:  # noqa: ARG002
        """See ``Drafter``."""
        self._forget_all()

    def _forget_all(self) -> None:
        self._searches: dict[_Key, _Search] = {}
        self._idle: OrderedDict[_Key, _Search] = OrderedDict()
        """Those none of whose branches runs, the one that ended longest ago first."""
        self._branches: dict[GenerateSequence, _Branch] = {}
        self._guessed: list[_Branch] = []
        """Those that the step which goes on has guesses for."""
        self._unread: OrderedDict[_Branch, None] = OrderedDict()
        """Those with tokens that are not indexed yet, and nobody hurries; some of them are over."""
        self._size = 0
        """Of all searches."""
        self._trust: dict[tuple[int, int, int], _Rate] = {}

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """See ``Drafter``."""
        branches = self._guessed = [self._branch(wish.sequence) for wish in wishes]
        self._catch_up()
        for branch in branches:
            self._read(branch, branch.left)
        self._make_room()
        return [self._guess(branch, wish) for branch, wish in zip(branches, wishes, strict=True)]

    def advance(self, steps: Sequence[Advance], hidden: Tensor) -> None:  # noqa: ARG002
        """See ``Drafter``."""
        for branch in self._guessed:
            self._judge(branch)
        for branch in self._guessed:
            self._read(branch, branch.left)
        self._guessed = []
        for step in steps:
            branch = self._branch(step.sequence)
            if branch.left:
                self._unread[branch] = None
        self._drop_oldest()
        self._make_room()

    def forget(self, sequence: GenerateSequence) -> None:
        """See ``Drafter``. The branch's text stays as long as its search is remembered."""
        branch = self._branches.get(sequence)
        if branch is None and not sequence.computed:
            return
        branch = self._branch(sequence)
        del self._branches[sequence]
        if branch.left:
            self._unread[branch] = None
            self._drop_oldest()
        search = branch.search
        search.branches -= 1
        if search.branches:
            return
        key = search.key
        if isinstance(key, Job) and all(other is sequence for other in key.sequences):
            self._drop(search)
        else:
            self._idle[key] = search
            if len(self._idle) > _SEARCHES:
                self._drop(next(iter(self._idle.values())))

    def clear_cache(self) -> None:
        """See ``Drafter``. There are none."""

    # Reading.

    def _branch(self, sequence: GenerateSequence) -> _Branch:
        """What is known about a branch, be it new."""
        branch = self._branches.get(sequence)
        if branch is None:
            job = sequence.job
            key = job if job.lease is None else (job.namespace, job.lease)
            search = self._searches.get(key)
            if search is None:
                search = self._searches[key] = _Search(key)
            self._idle.pop(key, None)
            search.branches += 1
            start = max(0, sequence.prefix // _PREFIX - 1) * _PREFIX
            branch = self._branches[sequence] = _Branch(search, sequence, start, Place(search.texts))
        return branch

    def _read(self, branch: _Branch, most: int) -> int:
        """See ``_Branch.read``; nothing is left to do for a search that was forgotten since."""
        search = branch.search
        if self._searches.get(search.key) is not search:
            return 0
        before = search.size
        done = branch.read(most)
        self._size += search.size - before
        return done

    def _catch_up(self) -> None:
        """Reads some of what nobody hurries to read, oldest first."""
        budget = _READ
        while self._unread and budget > 0:
            branch = next(iter(self._unread))
            budget -= self._read(branch, budget)
            if budget > 0:
                del self._unread[branch]

    def _drop_oldest(self) -> None:
        while len(self._unread) > _BACKLOG:
            self._unread.popitem(last=False)

    def _make_room(self) -> None:
        while self._size > _SIZE:
            if self._idle:
                self._drop(next(iter(self._idle.values())))
                continue
            # More goes than must, so that the largest need not be found at every step.
            largest = max(self._searches.values(), key=lambda search: search.size)
            before = largest.size
            largest.shrink(self._size - _SIZE + _SIZE // 64)
            self._size += largest.size - before

    def _drop(self, search: _Search) -> None:
        del self._searches[search.key]
        self._idle.pop(search.key, None)
        self._size -= search.size

    # Guessing.

    def _judge(self, branch: _Branch) -> None:
        """Compares what a branch drew with what was known before."""
        index, tokens = branch.search.index, branch.sequence.tokens
        for position in range(branch.done, len(tokens)):
            match = index.find(window(tokens, position))
            if match is not None:
                self._rate(match).learn(tokens[position] in match.followers)

    def _rate(self, match: Match) -> _Rate:
        """How often matches of this kind have the token that is drawn among their followers."""
        followers = match.followers
        kind = (match.size, sum(followers.values()).bit_length(), len(followers).bit_length())
        rate = self._trust.get(kind)
        if rate is None:
            rate = self._trust[kind] = _Rate()
        return rate

    def _guess(self, branch: _Branch, wish: Wish) -> Draft:
        tokens = wish.sequence.tokens
        guess = self._chain if wish.nodes == wish.depth else self._tree
        return guess(branch.search.index, window(tokens, len(tokens)), wish.depth, wish.nodes)

    def _chain(self, index: SuffixIndex, before: Window, depth: int, _: int) -> Draft:
        tokens: list[int] = []
        chances: list[float] = []
        while len(tokens) < depth and (match := index.find(before)) is not None:
            # The first maximum from the end is the latest.
            token, times = max(reversed(match.followers.items()), key=itemgetter(1))
            tokens.append(token)
            chances.append(self._rate(match).value * times / sum(match.followers.values()))
            before = (*before, token)[-REACH:]
        return Draft.chain(tokens, chances) if tokens else EMPTY

    def _tree(self, index: SuffixIndex, before: Window, depth: int, nodes: int) -> Draft:
        """The guesses that are likeliest to be accepted, all before them included."""
        tokens: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        depths = {-1: 0}
        queue: list[tuple[float, int, int, float, int, Window]] = []
        """Negated probability of the whole path, a number that makes it unique, token, chance, parent, window."""
        number = count()
        parent, path = -1, 1.0
        while True:
            if depths[parent] < depth and (match := index.find(before)) is not None:
                unit = self._rate(match).value / sum(match.followers.values())
                for token, times in reversed(match.followers.items()):
                    chance = times * unit
                    heapq.heappush(queue, (-path * chance, next(number), token, chance, parent, before))
            if not queue or len(tokens) == nodes:
                return Draft(tuple(tokens), tuple(parents), tuple(chances)) if tokens else EMPTY
            negated, _, token, chance, parent, before = heapq.heappop(queue)
            tokens.append(token)
            parents.append(parent)
            chances.append(chance)
            depths[len(tokens) - 1] = depths[parent] + 1
            parent, path, before = len(tokens) - 1, -negated, (*before, token)[-REACH:]


@dataclass(slots=True)
class _Rate:
    """How often something was so, with one case for and one against it before anything is seen."""

    yes: float = 1.0
    all: float = 2.0

    @property
    def value(self) -> float:
        return self.yes / self.all

    def learn(self, was: bool) -> None:
        if self.all >= _MEMORY:
            self.yes, self.all = self.yes / 2, self.all / 2
        self.yes, self.all = self.yes + was, self.all + 1
