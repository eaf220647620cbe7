"""Ties: where rounding decides between two tokens, either is right, and what follows is not compared.

Two runs of the engine that cut their steps in different places round differently. Where float64 says that the margin
between two tokens is below the bound on rounding, they may sample either, and then write different texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.protocol.types import Branch, GenerateRequest, ScoreItem
from engine.scheduler.draft import Draft
from kernels.common.noise import SAMPLE, gumbel_noise, noise_streams
from tests.engine.exact import exact_logits, float32_loss, gap
from tests.engine.helpers import SMALL, Harness, score

Floats = npt.NDArray[np.float64]


def count_same_tokens(
    folder: Path,
    request: GenerateRequest,
    branch: Branch,
    ours: Sequence[int],
    plain: Sequence[int],
    kv_dtype: str = "auto",
) -> int:
    """Return the number of tokens up to where two texts of a branch part; check that they part at a tie."""
    return count_up_to_tie(
        request, branch, ours, plain, _ends(folder, request), lambda tokens: _next_logits(folder, tokens, kv_dtype)
    )


def count_up_to_tie(
    request: GenerateRequest,
    branch: Branch,
    ours: Sequence[int],
    plain: Sequence[int],
    ends: set[int],
    next_logits: Callable[[Sequence[int]], tuple[Floats, float]],
) -> int:
    """Do the same with the given logits after a text and a bound on how far those of a run may be from them."""
    pairs = list(zip(ours, plain, strict=False))
    parted = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if parted is None:
        assert len(ours) == len(plain)
        return len(pairs)
    generated = (*branch.generated, *ours[:parted])
    logits, bound = next_logits((*request.prompt, *generated))
    possible = find_possible_tokens(logits, bound, request, branch, generated, ends)
    assert set(pairs[parted]) <= possible, f"token {parted}: {pairs[parted]} is no tie of {sorted(possible)}"
    return parted


def assert_same_tokens(
    folder: Path,
    asked: Sequence[GenerateRequest],
    ours: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    kv_dtype: str = "auto",
) -> None:
    """Check that the texts of all branches are the same up to ties."""
    branches = [(request, branch) for request in asked for branch in request.branches]
    for (request, branch), one, other in zip(branches, ours, plain, strict=True):
        count_same_tokens(folder, request, branch, one, other, kv_dtype)


def _next_logits(folder: Path, tokens: Sequence[int], kv_dtype: str) -> tuple[Floats, float]:
    """Return the logits after a text, and how far those of a run may be from them."""
    if kv_dtype == "auto":
        return exact_logits(folder, tokens)[-1].numpy(), float32_loss(folder).logit
    harness = Harness(folder, replace(SMALL, kv_dtype=kv_dtype, device="cpu"))
    vocab = range(harness.core.model.info.vocab_size)
    [result] = harness.score(score(ScoreItem((tuple(tokens),), (0,)), token_ids=vocab))
    assert result.values is not None
    return np.array(result.values[0]), gap(folder, kv_dtype)


def _ends(folder: Path, request: GenerateRequest) -> set[int]:
    """Return the tokens that end a branch."""
    eos = () if request.sampling.ignore_eos else Harness(folder).core.model._eos
    return {*eos, *request.sampling.stop_token_ids}


def find_possible_tokens(
    logits: Floats, bound: float, request: GenerateRequest, branch: Branch, generated: Sequence[int], ends: set[int]
) -> set[int]:
    """Return the tokens that may be sampled if each logit errs by up to ``bound``: one, except at a tie.

    ``generated``: the branch's tokens after the prompt. ``ends``: the tokens that ``min_tokens`` forbids.
    """
    law, position = request.sampling, len(request.prompt) + len(generated)
    x = _penalise(logits.copy(), request, generated)
    if len(generated) < law.min_tokens:
        x[list(ends)] = -math.inf
    slack = 2 * bound * max(law.repetition_penalty, 1 / law.repetition_penalty)  # of a difference of two
    if law.temperature == 0:
        return {int(token) for token in np.flatnonzero(x >= x.max() - slack)}
    x, slack = x / law.temperature, slack / law.temperature
    surely, maybe = find_kept(x, slack, law.top_k, law.top_p, law.min_p)
    where = (np.array([word], np.int64) for word in (branch.seed, branch.key, position))
    scores = x + gumbel_noise(noise_streams(*where, SAMPLE)[:, None], np.arange(len(x)))[0]
    least = scores[surely].max(initial=-math.inf) - slack
    return {int(token) for token in np.flatnonzero(maybe & (scores >= least))}


def _penalise(x: Floats, request: GenerateRequest, generated: Sequence[int]) -> Floats:
    law = request.sampling
    for token, bias in law.logit_bias:
        x[token] += bias
    seen = list({*request.prompt, *generated})
    if law.repetition_penalty != 1:
        x[seen] = np.where(x[seen] > 0, x[seen] / law.repetition_penalty, x[seen] * law.repetition_penalty)
    tokens, counts = np.unique(np.array(generated, np.int64), return_counts=True)
    x[tokens] -= law.frequency_penalty * counts + law.presence_penalty
    return x


def find_kept(
    x: Floats, slack: float, top_k: int, top_p: float, min_p: float
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return the tokens that truncation surely keeps, and those that it may keep, if differences err by ``slack``."""
    surely, maybe = (np.isfinite(x) for _ in range(2))
    if 0 < top_k < len(x):
        ranked = np.sort(x)
        above = len(x) - np.searchsorted(ranked, x + slack, "right")
        around = len(x) - np.searchsorted(ranked, x - slack, "left") - 1  # others that may be above
        surely, maybe = surely & (around < top_k), maybe & (above < top_k)
    if top_p < 1:
        least, most = (np.where(some, np.exp(x - x.max()), 0.0) for some in (surely, maybe))
        # A weight, and a sum of them, errs by a factor of exp(slack) at most; what top-k keeps decides their total.
        above = np.array([least[x > one + slack].sum() for one in x]) * math.exp(-slack) / most.sum()
        around = (np.array([most[x >= one - slack].sum() for one in x]) * math.exp(slack) - most) / least.sum()
        surely, maybe = surely & (around < top_p), maybe & (above < top_p)
    if min_p > 0:
        least = x.max() + math.log(min_p)
        surely, maybe = surely & (x >= least + slack), maybe & (x >= least - slack)
    return surely, maybe


def assert_same_draft(
    one: Draft, other: Draft, bound: float, find_edge: Callable[[tuple[int, ...]], float] = lambda _: 0.0
) -> None:
    """Check that two drafts are the same up to a tie, if logarithms of probabilities err by ``bound`` in each.

    A drafter takes paths in the order of their probabilities (products along the path). At a tie two drafters part:
    the likeliest path that only one has is then as likely as the likeliest that only the other has. The paths after
    these follow from them.

    ``find_edge``: how much the logarithms of the probabilities after a path change with a candidate at the edge of the
    branch's filters, which one drafter may keep and another not. Asked only where the drafts differ.
    """
    ours, theirs = _paths(one), _paths(other)
    depth = max((len(path) for path in (*ours, *theirs)), default=0)
    for path in ours.keys() & theirs.keys():
        error = abs(ours[path] - theirs[path])
        if error > 2 * depth * bound:
            assert error <= 2 * depth * bound + sum(find_edge(path[:end]) for end in range(len(path)))
    if ours.keys() != theirs.keys():
        (only_ours, gain), (only_theirs, loss) = (
            max(((worth, path) for path, worth in some.items() if path not in rest), default=(math.inf, ()))
            for some, rest in ((ours, theirs), (theirs, ours))
        )
        if abs(only_ours - only_theirs) > 2 * depth * bound:
            parents = {path[:end] for path in (gain, loss) for end in range(len(path))}
            assert any(map(find_edge, parents)), "the drafts differ, and not by a tie"


def _paths(draft: Draft) -> dict[tuple[int, ...], float]:
    """Return the logarithm of the probability of each path of a draft."""
    worths: list[float] = []
    for parent, chance in zip(draft.parents, draft.probs, strict=True):
        worths.append((worths[parent] if parent >= 0 else 0.0) + math.log(max(chance, 1e-300)))
    return {tuple(draft.path(index)): worth for index, worth in enumerate(worths)}
