"""Workloads of every system, and their timing. Standard library only: peers run in their own environments."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

VOCAB = range(300, 31_000)
"""Token ids of prompts: neither single bytes nor the end of sequence."""


@dataclass(frozen=True, slots=True)
class Request:
    """``samples`` continuations of ``prompt``, each of exactly ``tokens`` tokens: the end of sequence is ignored."""

    prompt: tuple[int, ...]
    samples: int
    tokens: int


Outputs = list[list[list[int]]]
"""New token ids by request and sample."""
Generate = Callable[[Sequence[Request]], Outputs]


@runtime_checkable
class Stopwatch(Protocol):
    """A system with programs that time some cases themselves."""

    def time_case(self, case: str) -> dict[str, float] | None:
        """Return the tokens and seconds of a case; ``None`` if it has no program for it."""
        ...


class System(Protocol):
    """An engine with the checkpoint loaded."""

    def session(self, *, seed: int, greedy: bool = False) -> AbstractContextManager[Generate]:
        """Open a session with a cold cache, in which computed prefixes may be reused. Outside the engine is idle.

        Tokens are sampled at temperature 1 without filters, or greedily. The requests of one call run together; their
        prompts have one length and they have equally many samples.
        """
        ...


def best_of_n(generate: Generate, noise: random.Random, tokens: int) -> int:
    """W1: one prompt of 512 tokens, 16 samples of 128."""
    return _ask(generate, [Request(_prompt(noise, 512), 16, min(128, tokens))])


def mixed_serving(generate: Generate, noise: random.Random, tokens: int) -> int:
    """W2: 16 distinct prompts of 64 tokens, 16, 32, … 256 tokens out, all at once."""
    return _ask(generate, [Request(_prompt(noise, 64), 1, min(16 * count, tokens)) for count in range(1, 17)])


def tree_search(generate: Generate, noise: random.Random, tokens: int) -> int:
    """W3: a prompt of 512 tokens, 8 rounds of 8 beams of 32 tokens. After each round 4 survive and are doubled; the
    next round sends each survivor's whole path."""
    prompt = _prompt(noise, 512)
    generated = 0
    requests = [Request(prompt, 8, min(32, tokens))]
    for _ in range(8 if tokens >= 32 else 2):
        beams = _checked(requests, generate(requests))
        generated += sum(len(tokens) for _, tokens in beams)
        survivors = noise.sample(beams, 4)
        requests = [Request((*path, *added), 2, len(added)) for path, added in survivors]
    return generated


def single_stream(generate: Generate, noise: random.Random, tokens: int) -> int:
    """W4: a prompt of 32 tokens, one sequence of 128."""
    return _ask(generate, [Request(_prompt(noise, 32), 1, min(128, tokens))])


def long_prompt(generate: Generate, noise: random.Random, _tokens: int) -> int:
    """Compute a prompt of 2,000 tokens; its tokens are counted, as one alone is generated."""
    prompt = _prompt(noise, 2000)
    _ask(generate, [Request(prompt, 1, 1)])
    return len(prompt)


WORKLOADS: dict[str, Callable[[Generate, random.Random, int], int]] = {
    "W1": best_of_n,
    "W2": mixed_serving,
    "W3": tree_search,
    "W4": single_stream,
    "prompt": long_prompt,
}
"""Workloads by name; each returns the number of its tokens."""


def run(case: str, system: System, seed: int) -> dict[str, float]:
    """Time one run of a workload from a cold cache. Every seed has its own prompts."""
    if isinstance(system, Stopwatch) and (timed := system.time_case(case)) is not None:
        return timed
    with system.session(seed=seed) as generate:
        noise = random.Random(seed)
        start = time.perf_counter()
        tokens = WORKLOADS[case](generate, noise, 1 << 30)
        return {"tokens": tokens, "seconds": time.perf_counter() - start}


def warm_up(case: str, system: System) -> dict[str, float]:
    """Run the same shapes briefly, so that no timed run allocates or compiles."""
    if isinstance(system, Stopwatch):
        return {}
    with system.session(seed=1) as generate:
        WORKLOADS[case](generate, random.Random(0), 8)
    return {}


def greedy(system: System) -> list[int]:
    """Return the greedy continuation of one prompt, on which systems that compute the same model agree."""
    with system.session(seed=1, greedy=True) as generate:
        return generate([Request(_prompt(random.Random(0), 32), 1, 8)])[0][0]


def cache_hit(system: System, seed: int) -> dict[str, float]:
    """Return the median seconds (of 10) to the first token of a cached 2,000-token prefix with 10 new tokens, and of 10
    tokens alone.
    """
    noise = random.Random(seed)
    prefix = _prompt(noise, 2000)
    hit, alone = [], []
    with system.session(seed=seed) as generate:
        _ask(generate, [Request(prefix, 1, 1)])
        for _ in range(10):
            alone.append(_seconds(generate, Request(_prompt(noise, 10), 1, 1)))
            hit.append(_seconds(generate, Request((*prefix, *_prompt(noise, 10)), 1, 1)))
    return {"hit": statistics.median(hit), "alone": statistics.median(alone)}


def decode_step(case: str, system: System, seed: int) -> dict[str, float]:
    """Return the mean seconds of a decode step of W1 (16 branches after 512 tokens) or W4 (one sequence)."""
    prompt, samples = (512, 16) if case == "W1" else (32, 1)
    return _decode_step(system, seed, prompt, samples)


def decode(system: System, batch: int, seed: int) -> dict[str, float]:
    """Return the mean seconds of a decode step of branches after 32 tokens, mostly matrix products."""
    return _decode_step(system, seed, 32, batch)


def _decode_step(system: System, seed: int, prompt: int, samples: int) -> dict[str, float]:
    """Return the mean seconds of 127 decode steps after a cached prompt, and the number of rows."""
    ids = _prompt(random.Random(seed), prompt)
    with system.session(seed=seed) as generate:
        _ask(generate, [Request(ids, samples, 1)])
        short = _seconds(generate, Request(ids, samples, 1))
        return {"seconds": (_seconds(generate, Request(ids, samples, 128)) - short) / 127, "rows": samples}


def _ask(generate: Generate, requests: list[Request]) -> int:
    return sum(len(tokens) for _, tokens in _checked(requests, generate(requests)))


def _checked(requests: Sequence[Request], outputs: Outputs) -> list[tuple[tuple[int, ...], list[int]]]:
    """Return every sample as (prompt, new tokens), after checking their number and lengths."""
    asked = [[request.tokens] * request.samples for request in requests]
    given = [[len(sample) for sample in samples] for samples in outputs]
    if asked != given:
        raise RuntimeError(f"asked for samples of {asked} tokens, given were {given}")
    return [(one.prompt, sample) for one, samples in zip(requests, outputs, strict=True) for sample in samples]


def _seconds(generate: Generate, request: Request) -> float:
    start = time.perf_counter()
    _ask(generate, [request])
    return time.perf_counter() - start


def _prompt(noise: random.Random, length: int) -> tuple[int, ...]:
    return tuple(noise.choices(VOCAB, k=length))
