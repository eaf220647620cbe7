"""Beam search over steps, guided by a process reward model.

Source: Snell et al. 2024, "Scaling LLM Test-Time Compute Optimally", section 5.2: N samples of a step, keep the best
N / M by the verifier, expand each M times. Each level is a barrier, since beams are compared with one another.

Unlike the paper, ``adaptive`` beams get their M samples only if the first one is uncertain (``needs_no_siblings``), no
further ones if a new step is unlikely (``num_useful_samples``), and one place for equal steps. Without it the search is
the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from pydantic import Field

from reasoner.search.search import Search
from reasoner.strategies.base import (
    MIN_NEW_PROBABILITY,
    Choice,
    Params,
    Samples,
    Steps,
    Strategy,
    VerifierUse,
    choose_best_scored,
    expand_and_score,
)
from reasoner.tree import Node, unseen

CERTAIN_LOGPROB = math.log(0.9)
"""Log-probability above which a sampled step gets no siblings, since they would be duplicates."""


class Beam(Params):
    n: Samples = 16
    expansions: Annotated[int, Field(ge=1, le=64, description="Continuations of each kept beam (M).")] = 4
    max_steps: Steps = 40
    adaptive: bool = Field(
        True,
        description="Sample siblings only where a step is uncertain and another one likely, and keep equal ones once; "
        "false: always all of them, as in the paper.",
    )


async def run(search: Search, params: Beam) -> Choice:
    """Extend n beams step by step and keep the n/expansions best-scored ones; the best finished one wins."""

    async def scores(rivals: list[Node]) -> dict[Node, float]:
        return {node: node.score for node in rivals if node.score is not None}

    return await beam_search(search, params, scores)


async def beam_search(
    search: Search, params: Beam, value: Callable[[list[Node]], Awaitable[dict[Node, float]]]
) -> Choice:
    """Keep the steps with the highest value at each level; steps without a value are pruned."""
    expansions = min(params.expansions, params.n)
    width = params.n // expansions
    beams, share = [search.root], params.n
    for _ in range(params.max_steps):
        if params.adaptive:
            level = await _sample_uncertain(search, beams, share, expansions)
            values = await value(drop_duplicates(level))
        else:
            level = await expand_and_score(search, beams, share)
            values = await value(level)
        kept = sorted(values, key=lambda node: (-values[node], node.path))[:width]
        await search.prune([node for node in level if node.open and node not in kept])
        beams = [node for node in kept if node.open]
        width -= len(kept) - len(beams)  # a finished beam keeps its slot
        if not beams:
            break
        share = expansions * width // len(beams)
    return choose_best_scored(await search.ensure_candidates())


async def _sample_uncertain(search: Search, beams: Sequence[Node], share: int, expansions: int) -> list[Node]:
    """Sample next steps of each beam, one and then up to ``share``, ``expansions`` at once, while they seem useful."""
    level = await expand_and_score(search, beams, 1)
    decided = {node.parent for node in level if needs_no_siblings(node)}
    doubtful, rest = [beam for beam in beams if beam not in decided], share - 1
    while rest > 0 and doubtful:
        samples = {beam: [node for node in level if node.parent is beam] for beam in doubtful}
        more = {beam: num_useful_samples(samples[beam], min(rest, expansions)) for beam in doubtful}
        doubtful = [beam for beam in doubtful if more[beam] > 0]
        level += await expand_and_score(search, doubtful, [more[beam] for beam in doubtful])
        rest -= expansions
    return level


def num_useful_samples(samples: Sequence[Node], most: int) -> int:
    """Return the number of further samples of a next step, at most ``most``; 0 if a new step is unlikely."""
    return most if unseen(samples) >= MIN_NEW_PROBABILITY else 0


def needs_no_siblings(node: Node) -> bool:
    """Return True if a beam needs no further samples of its next step.

    The first one was near-certain, or scored at least as high as the beam itself.
    """
    beam = node.parent
    scored_higher = beam is not None and beam.score is not None and node.score is not None and node.score >= beam.score
    return scored_higher or node.logprob > CERTAIN_LOGPROB


def drop_duplicates(nodes: list[Node]) -> list[Node]:
    """Keep one node for each text under the same parent, so that duplicates do not fill the beam."""
    first: dict[tuple[tuple[int, ...], str], Node] = {}
    for node in sorted(nodes, key=lambda node: node.path):
        first.setdefault((() if node.parent is None else node.parent.path, node.text), node)
    return list(first.values())


STRATEGY = Strategy("beam", Beam, run, VerifierUse.STEP_SCORES)
