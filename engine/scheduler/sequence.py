"""What the engine keeps about the work in flight: jobs (one per request) and their sequences."""

from __future__ import annotations

import math
import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.cache.paged_kv import PageTable
from engine.cache.radix_tree import Match
from engine.protocol.types import Branch, Completion, Delta, EngineError, SamplingParams, ScoreResult, TokenLogprob
from engine.sampling.logits_processors import LogitsRow
from engine.sampling.penalties import Ints, Penalties
from engine.text.detokenizer import StopStrings, TextReader

Event = Completion | Delta | ScoreResult | EngineError
"""What a job hears: results as they come, or one error that ends it."""


@dataclass(eq=False, slots=True)
class Job:
    """One request in flight."""

    request_id: str
    sink: Callable[[Event], None]
    """Called by the engine's thread."""
    deadline: float = math.inf
    """On ``time.monotonic``'s clock."""
    stream: bool = False
    priority: int = 0
    """Higher goes first."""
    namespace: str | None = None
    """Cached prefixes are shared within a namespace only."""
    lease: str | None = None
    """Pins the pages of the job's sequences when they leave."""
    allow_draft: bool = True
    """Whether its tokens may be guessed."""
    sequences: list[Sequence] = field(default_factory=list)
    """Those that are not finished."""
    waiting: list[Sequence] = field(default_factory=list)
    """Those of them that do not run, oldest first. The scheduler's, like the next two."""
    order: int = 0
    """Arrival number: smaller is older."""
    admissions_at_arrival: int = 0
    """How many sequences the scheduler had admitted when the job came."""
    arrived_at: float = field(default_factory=time.monotonic)


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """Tokens whose keys and values are computed in order: ``computed`` catches up with ``len(tokens)``."""

    job: Job
    index: int
    tokens: list[int]
    num_prefix_tokens: int
    """How many tokens were known on arrival; only these can be shared before they are computed."""
    order: int = 0
    """Arrival number, given by the scheduler: smaller is older."""
    num_computed: int = 0
    num_cached: int | None = None
    """Tokens that the cache had when the sequence first ran. Recomputing after a preemption is not the client's
    bill."""
    started_at: float | None = None
    """When it first ran."""
    table: PageTable | None = None
    match: Match | None = None
    """What the cache had when the scheduler last looked, while the sequence waits."""

    @property
    def max_cached(self) -> int:
        """How many tokens may come from the cache; the others must be forwarded, since their read-out is wanted."""
        return len(self.tokens) - 1

    @property
    def pages(self) -> PageTable:
        """The page table of a sequence that runs."""
        if self.table is None:
            raise RuntimeError("the sequence is not running")
        return self.table


@dataclass(eq=False, slots=True, kw_only=True)
class GenerateSequence(Sequence):
    """A branch that is being continued."""

    branch: Branch
    seed: int
    """The branch's seed and key as signed 64-bit words."""
    key: int
    sampling: SamplingParams
    eos: frozenset[int]
    """Tokens that end the sequence and are no text; empty when the request ignores them."""
    stop_tokens: frozenset[int] = field(init=False)
    """These, and those that the request names: all tokens that end it."""
    terminal_tokens: frozenset[int] = field(init=False)
    """These, and those that are a stop string by themselves: what follows them is not worth guessing. Before
    ``min_tokens`` such a string does not end it."""
    stop_strings: StopStrings | None
    reader: TextReader
    generated: list[int]
    """``Branch.generated`` and then the new tokens; the reader follows this list."""
    text_start: int
    """Characters of ``Branch.generated``'s text; what follows is this request's."""
    num_chars_searched: int
    """Characters already searched for stop strings."""
    num_chars_sent: int
    """Characters already streamed, those of ``Branch.generated`` included."""
    num_tokens_sent: int = 0
    """New tokens already streamed."""
    first_token_at: float | None = None
    """When it got its first token."""
    logprob: float = 0.0
    num_drafted: int = 0
    """Guesses at its tokens that were computed."""
    num_accepted: int = 0
    """Those of them that became tokens of its answer."""
    penalties: Penalties | None = None
    """Of a request that has any."""
    forbidden: Ints | None = None
    """What may not be drawn before ``min_tokens``, if the request says that."""
    logprobs: list[TokenLogprob] | None = None
    """Of the new tokens, if asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Of the prompt's tokens that were read so far, if asked for."""
    prompt_len: int = 0

    def __post_init__(self) -> None:
        self.stop_tokens = self.eos.union(self.sampling.stop_token_ids)
        self.terminal_tokens = (
            self.stop_tokens if self.stop_strings is None else self.stop_tokens | self.stop_strings.tokens
        )

    @property
    def max_cached(self) -> int:
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len:
            # The next token's log-probability is read at the position before it.
            return len(self.prompt_logprobs) - 1
        return len(self.tokens) - 1

    @property
    def has_logits_processors(self) -> bool:
        """True if the request changes logits before tokens are sampled from them."""
        return self.penalties is not None or self.forbidden is not None

    def logits_row(self, draft_prefix: abc.Sequence[int], num_draft_tokens: int) -> LogitsRow:
        """Return what changes the logits after ``num_draft_tokens`` draft tokens.

        ``draft_prefix``: these tokens; empty if the penalties shall not count them.
        """
        is_short = len(self.generated) + num_draft_tokens < self.sampling.min_tokens
        return LogitsRow(self.penalties, self.forbidden if is_short else None, draft_prefix)

    @property
    def new_tokens(self) -> list[int]:
        """What this request added so far."""
        return self.generated[len(self.branch.generated) :]


@dataclass(eq=False, slots=True, kw_only=True)
class ScoreSequence(Sequence):
    """A sequence that is only read. Its tokens end at the last position to read."""

    read_positions: tuple[int, ...]
    """Positions to read, in the order of the answer."""
    token_ids: tuple[int, ...]
    max_compute: float
    """Most tokens to compute; infinite when the request does not say."""
    values: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Logits by position."""

    @property
    def max_cached(self) -> int:
        return min(self.read_positions)
