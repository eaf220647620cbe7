"""Options and statistics of one model's engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """Options of one model's engine."""

    kv_tokens: int | None = None
    """Capacity of the key-value pool in tokens, running and cached; ``None``: what 1 GiB holds, at most 131,072."""
    page_size: int = 16
    """Tokens per page of the key-value pool."""
    max_running: int = 256
    """Maximum number of running sequences."""
    max_waiting: int = 4096
    """Maximum number of waiting sequences, and of sequences of one request."""
    step_tokens: int = 2048
    """Maximum number of tokens computed in one step."""
    lease_share: float = 0.5
    """Maximum share of the pool that leases may pin."""
    lease_seconds: float = 600.0
    """Seconds after which a lease that no request names ends."""
    draft: str = "off"
    """Drafter of generating models, one of ``engine.speculation.load.FORMS``."""
    draft_length: int = 8
    """Maximum depth of a draft."""
    deterministic: bool = False
    """Bitwise reproducible results, whatever else runs and however a prompt is chunked, cached or recomputed. Slower;
    without it the same holds but for rounding (about 1e-6 of a logit)."""
    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto``: a GPU if there is one and it supports the model."""
    dtype: str = "auto"
    """Type of weights, keys and values: ``float32``, ``bfloat16``, or ``auto``: bfloat16 on a GPU. The CPU has float32
    alone."""
    kv_dtype: str = "auto"
    """Type of keys and values: ``int8`` or ``fp8`` (e4m3) with a scale for each token and head, or ``auto``: ``dtype``.

    A cache entry is a function of the token's own key and value, whatever is computed beside it, so ``deterministic``
    holds to the bit. Without it, rounding may now and then tip a number to its neighbour, which changes logits by up to
    1e-3. Against float32, logits differ by 0.6 % of their spread with int8 and by 3 % with fp8, which has fewer digits
    (the bundled policy)."""
    debug: bool = False
    """Check every invariant of the cache and the scheduler whenever the engine is idle."""


@dataclass(frozen=True, slots=True)
class CoreStats:
    """Statistics of one model's engine. Tokens are counted since the start."""

    running: int
    waiting: int
    kv_tokens: int
    kv_capacity: int
    pinned_tokens: int
    """Slots in pages that leases pin."""
    leases: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafted_tokens: int
    """Draft tokens that were verified."""
    accepted_tokens: int
    """Draft tokens that were accepted, each of which saved a step."""
    scored_tokens: int
    preemptions: int
