"""Work in flight: requests, and their sequences."""

from __future__ import annotations

import logging
import math
import time
from collections import abc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.adapters.invocation import TaggedTokens
from engine.cache.page_drops import PageDrops
from engine.cache.page_table import PageTable
from engine.cache.radix_tree import Match
from engine.offloading.loads import SequenceLoads
from engine.protocol.types import Branch, Completion, Delta, EngineError, SamplingParams, ScoreResult, TokenLogprob
from engine.sampling.grammar import Grammar, Words
from engine.sampling.logits_processors import Ints, LogitsRow, Penalties
from engine.text.detokenizer import StopStrings, TextReader
from kernels.linear.low_rank import NO_ADAPTER

_log = logging.getLogger(__name__)

PENDING_TOKEN = -1
"""Stands in ``Sequence.tokens`` for a token that was sampled on the device, until the host has read it."""

Event = Completion | Delta | ScoreResult | EngineError
"""An event of a request for its callback: a result, or an error that ends the request."""


@dataclass(eq=False, slots=True)
class Request:
    """A request in flight."""

    request_id: str
    on_event: Callable[[Event], None]
    """Receiver of the request's events; called by the engine's thread."""
    deadline: float = math.inf
    """Time of ``time.monotonic`` at which the request is cancelled."""
    stream: bool = False
    priority: int = 0
    """Rank in the queue: higher goes first."""
    namespace: str | None = None
    """Scope within which cached prefixes are shared."""
    pin_key: str | None = None
    """Key under which the pages of the request's sequences are pinned when they finish."""
    allow_draft: bool = True
    sequences: list[Sequence] = field(default_factory=list)
    """Sequences that are not finished."""
    waiting: list[Sequence] = field(default_factory=list)
    """Sequences that are not running, oldest first. Set by the scheduler, like the next two fields."""
    order: int = 0
    """Arrival number: smaller is older."""
    admissions_at_arrival: int = 0
    """Number of sequences that the scheduler had admitted when the request arrived."""
    arrived_at: float = field(default_factory=time.monotonic)
    num_unexplained_failures: int = 0
    """Number of failed steps of which no single request was the cause."""
    error: EngineError | None = None
    """Error of the first sequence that failed, for the client once the others have finished."""


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """Tokens whose keys and values are computed in order, until ``num_computed`` reaches ``len(tokens)``."""

    request: Request
    index: int
    tokens: list[int]
    """All tokens; the last two of a branch may be ``PENDING_TOKEN`` while steps are in flight."""
    num_prefix_tokens: int
    """Number of tokens on arrival; only pages of these can be awaited by other sequences."""
    order: int = 0
    """Arrival number, given by the scheduler: smaller is older."""
    num_computed: int = 0
    """Number of tokens whose keys and values are computed, or will be by the steps in flight."""
    num_cached: int | None = None
    """Cached tokens when the sequence first ran; a preemption does not change what the client is billed for."""
    started_at: float | None = None
    """Time at which the sequence first ran."""
    table: PageTable | None = None
    """Page table while the sequence runs."""
    match: Match | None = None
    """Result of the scheduler's last cache lookup while the sequence waits."""
    adapter_index: int = NO_ADAPTER
    """Index of the adapter among those of the model."""
    adapter_start: int = 0
    """First position at which the adapter is active."""
    is_probed: bool = False
    """True if the request asks for scores of the model's probe."""
    loads: SequenceLoads = field(default_factory=SequenceLoads)
    """Load of its prefix from a lower tier while it waits."""
    claim: str | None = None
    """Key under which its pages are claimed after a preemption, until it runs again."""
    drops: PageDrops | None = None
    """Pages of its thought that are dropped, if their number is bounded."""
    error: EngineError | None = None
    """Reason why this sequence alone cannot go on; it ends once the results of its step are read."""

    def fail(self, error: Exception) -> None:
        """Note an error that lies in this sequence's own data; the first one counts.

        What a step computes for other sequences does not depend on it, so nothing else has to end.
        """
        if self.error is not None:
            return
        if isinstance(error, EngineError):
            # Tracebacks would keep the step's tensors until the client has read the error.
            self.error = error.with_traceback(None)
            self.error.__context__ = None
        else:
            _log.error("a sequence of request %s failed", self.request.request_id, exc_info=error)
            self.error = EngineError(f"the engine failed while processing this request: {error!r}")

    @contextmanager
    def isolate_errors(self) -> Iterator[None]:
        """Let an error within end this sequence alone."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    @property
    def cache_keys(self) -> abc.Sequence[int]:
        """The tokens as the cache knows them: keys and values depend on the adapter, too."""
        if self.adapter_index == NO_ADAPTER:
            return self.tokens
        return TaggedTokens(self.tokens, self.adapter_index, self.adapter_start)

    @property
    def scope(self) -> Hashable:
        """The conditions of the keys of a branch that lost pages, besides ``cache_keys``; ``None`` without a bound."""
        return None if self.drops is None else (self.request.namespace, self.drops.rule)

    @property
    def num_inherited(self) -> int:
        """Number of tokens on arrival that other branches may have, too."""
        return self.num_prefix_tokens

    @property
    def num_sharable(self) -> int:
        """Number of computed tokens whose pages may be shared while the sequence runs: of a thought that may lose pages
        only those that it begins with, since pages of the tree are not free before the pages after them are."""
        return self.num_computed if self.drops is None else min(self.num_computed, self.num_prefix_tokens)

    @property
    def max_known(self) -> int:
        """Maximum number of tokens whose keys may be known already; the hidden states of the others are needed."""
        return len(self.tokens) - 1

    @property
    def max_cached(self) -> int:
        """Maximum number of tokens to take from the radix tree, which has no keys that depend on dropped pages."""
        return self.max_known if self.drops is None else min(self.max_known, self.drops.first_drop)

    def drop_unread(self) -> None:
        """Forget the tokens that the host has not read: the sequence ends, or starts again from those that it has."""

    @property
    def pages(self) -> PageTable:
        """Page table of a running sequence."""
        if self.table is None:
            raise RuntimeError("the sequence is not running")
        return self.table


@dataclass(eq=False, slots=True, kw_only=True)
class GenerateSequence(Sequence):
    """A branch that generates tokens."""

    branch: Branch
    seed: int
    """``branch.seed`` as a signed 64-bit integer."""
    key: int
    """``branch.key`` as a signed 64-bit integer."""
    sampling: SamplingParams
    eos: frozenset[int]
    """End-of-sequence tokens, which are no text; empty if the request ignores them."""
    stop_tokens: frozenset[int] = field(init=False)
    """All tokens that end the branch: ``eos`` and the request's ``stop_token_ids``."""
    max_len: int = field(init=False)
    """Number of tokens with which ``branch.max_tokens`` is reached."""
    terminal_tokens: frozenset[int] = field(init=False)
    """``stop_tokens`` and tokens that are a stop string by themselves: drafting what follows them is useless. Before
    ``min_tokens`` such a string does not end the branch."""
    stop_strings: StopStrings | None
    reader: TextReader
    generated: list[int]
    """``branch.generated`` and then the new tokens; ``reader`` decodes this list."""
    text_start: int
    """Length of the text of ``branch.generated``; what follows is new."""
    num_chars_searched: int
    """Number of characters searched for stop strings."""
    num_chars_sent: int
    """Number of characters streamed, those of ``branch.generated`` included."""
    num_tokens_sent: int = 0
    first_token_at: float | None = None
    logprob: float = 0.0
    """Sum of the log-probabilities of the new tokens."""
    num_drafted: int = 0
    """Number of draft tokens that were verified."""
    num_accepted: int = 0
    """Number of draft tokens that became tokens of the answer."""
    penalties: Penalties | None = None
    forbidden: Ints | None = None
    """Tokens that must not be sampled before ``min_tokens``."""
    grammar: Grammar | None = None
    """Position in the language of the request's constraint."""
    logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of the new tokens; ``None``, like the next list, if they were not requested."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    prompt_len: int = 0
    probe_score: float | None = None
    """Score of the state that predicted the latest token; set when the branch ends."""

    def __post_init__(self) -> None:
        self.stop_tokens = self.eos.union(self.sampling.stop_token_ids)
        self.max_len = self.num_prefix_tokens + self.branch.max_tokens
        own_tokens = frozenset[int]() if self.stop_strings is None else self.stop_strings.tokens
        self.terminal_tokens = self.stop_tokens | own_tokens

    @property
    def max_known(self) -> int:
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len:
            # The next token's log-probability is read at the position before it.
            return len(self.prompt_logprobs) - 1
        return len(self.tokens) - 1

    @property
    def num_inherited(self) -> int:
        return self.prompt_len

    @property
    def can_have_logits_processors(self) -> bool:
        """True if the request changes logits before some of its tokens are sampled from them."""
        return self.grammar is not None or self.penalties is not None or self.forbidden is not None

    @property
    def reads_own_tokens(self) -> bool:
        """True if the logits of the next token depend on the last one in other ways than through the model."""
        return self.penalties is not None or (self.grammar is not None and not self.grammar.is_lifted)

    @property
    def num_read(self) -> int:
        """Number of tokens that the host knows."""
        return self.prompt_len + len(self.generated)

    @property
    def has_logits_processors(self) -> bool:
        """True if the request changes logits before tokens are sampled from them."""
        return self.reads_own_tokens or self.forbidden is not None

    def append(self, token: int, logprob: float, detail: TokenLogprob | None) -> None:
        """Append a sampled token, or read the first ``PENDING_TOKEN``.

        ``detail``: its log-probability by the model, if requested.
        """
        index = self.prompt_len + len(self.generated)
        if index < len(self.tokens):
            self.tokens[index] = token
        else:
            self.tokens.append(token)
        self.generated.append(token)
        self.logprob += logprob
        if self.penalties is not None:
            self.penalties.add(token)
        if self.grammar is not None:
            self.grammar.accept(token)
        if self.logprobs is not None and detail is not None:
            self.logprobs.append(detail)

    def drop_unread(self) -> None:
        del self.tokens[self.num_read :]
        self.num_computed = min(self.num_computed, len(self.tokens))

    def logits_row(
        self, draft_prefix: abc.Sequence[int], num_draft_tokens: int, allowed: Words | None = None
    ) -> LogitsRow:
        """Return what changes the logits after ``num_draft_tokens`` draft tokens.

        ``draft_prefix``: these tokens, or empty if the penalties should not count them. ``allowed``: the mask of the
        branch's grammar there.
        """
        is_short = len(self.tokens) - self.prompt_len + num_draft_tokens < self.sampling.min_tokens
        return LogitsRow(self.penalties, self.forbidden if is_short else None, draft_prefix, allowed)

    @property
    def new_tokens(self) -> list[int]:
        return self.generated[len(self.branch.generated) :]


@dataclass(eq=False, slots=True, kw_only=True)
class ScoreSequence(Sequence):
    """A sequence that is only scored. Its tokens end at the last position to score."""

    read_positions: tuple[int, ...]
    """Positions to score, in the order of the answer."""
    token_ids: tuple[int, ...]
    """Tokens whose logits are the scores; empty: all outputs."""
    max_compute: float
    """Maximum number of tokens to compute; infinite if the request sets none."""
    is_normalized: bool = False
    """True if the scores are log-probabilities instead of logits."""
    values: dict[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def max_known(self) -> int:
        return min(self.read_positions)
