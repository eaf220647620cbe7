"""Random draft heads, a drafter that records its requests, and reference draft tokens computed from logits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.core.reference import float64
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.drafter import Drafter, DraftRequest, StepResult
from engine.speculation.drafters.proposal import _REACH as REACH
from engine.speculation.drafters.proposal import NOISE
from kernels.common.noise import SAMPLE, gumbel_noise, noise_streams
from tests.engine.exact import exact_reference
from tests.engine.ties import assert_same_draft, find_kept
from tests.rounding import MARGIN, compute_rounded, float32_bound
from tests.seeds import shift

Floats = npt.NDArray[np.float64]
Guess = TypeVar("Guess")

HIDDEN, VOCAB, HEADS, KV_HEADS, HEAD_DIM, INNER, EPS, THETA = 48, 400, 6, 2, 16, 64, 1e-6, 500.0
"""Dimensions of the random heads; the first ones equal those of the tests' targets."""


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def medusa_parts(heads: int = 3, seed: int = 0) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and weights of Medusa heads with peaked distributions."""
    generator = torch.Generator().manual_seed(shift(seed))
    tensors = {
        "trunk.gate_proj.weight": torch.randn(INNER, 2 * HIDDEN, generator=generator) * 0.3,
        "trunk.up_proj.weight": torch.randn(INNER, 2 * HIDDEN, generator=generator) * 0.3,
        "heads.weight": torch.randn(heads * HIDDEN, INNER, generator=generator),
        "heads.bias": torch.randn(heads * HIDDEN, generator=generator),
    }
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "heads": heads, "intermediate_size": INNER}
    return {"kind": "medusa", **sizes}, tensors


def eagle_parts(seed: int = 0) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and weights of an EAGLE layer whose output depends on its context."""
    generator = torch.Generator().manual_seed(shift(seed))
    keys, queries = KV_HEADS * HEAD_DIM, HEADS * HEAD_DIM
    matrices = {
        "fc": (HIDDEN, 2 * HIDDEN),
        "layer.self_attn.q_proj": (queries, HIDDEN),
        "layer.self_attn.k_proj": (keys, HIDDEN),
        "layer.self_attn.v_proj": (keys, HIDDEN),
        "layer.self_attn.o_proj": (HIDDEN, queries),
        "layer.mlp.gate_proj": (INNER, HIDDEN),
        "layer.mlp.up_proj": (INNER, HIDDEN),
        "layer.mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {f"{name}.weight": torch.randn(*shape, generator=generator) * 0.3 for name, shape in matrices.items()}
    tensors["hidden_norm.weight"] = 0.5 + torch.rand(HIDDEN, generator=generator)
    config = {
        "kind": "eagle",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "layer_norm_eps": EPS,
        "rope_theta": THETA,
    }
    return config, tensors


class Asked(NamedTuple):
    """A draft request at the time it was made, with the draft returned."""

    tokens: list[int]
    seed: int
    key: int
    temperature: float
    wish: DraftRequest
    draft: Draft


class Recorder:
    """A drafter that records its requests and drafts."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.kind, self.key_shapes = drafter.kind, drafter.key_shapes
        self.hidden_state_needs, self.observed_layers = drafter.hidden_state_needs, drafter.observed_layers
        self.asked: list[Asked] = []

    def reset(self, cache: KVCache) -> None:
        self._drafter.reset(cache)

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        drafts = self._drafter.propose(wishes)
        for wish, draft in zip(wishes, drafts, strict=True):
            one = wish.sequence
            self.asked.append(Asked(list(one.tokens), one.seed, one.key, one.sampling.temperature, wish, draft))
        return drafts

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        self._drafter.observe_step(steps, hidden)

    def release(self, sequence: GenerateSequence) -> None:
        self._drafter.release(sequence)

    def warm_ups(self) -> list[Callable[[], None]]:
        return self._drafter.warm_ups()

    def clear_cache(self) -> None:
        self._drafter.clear_cache()


class Target:
    """The target computed by transformers, in float64 throughout."""

    def __init__(self, folder: Path) -> None:
        self._model = exact_reference(folder)
        self.embedding: Tensor = self._model.get_input_embeddings().weight.detach()

    def features(self, tokens: Sequence[int]) -> Tensor:
        """Return the hidden states before the last norm, ``[tokens, hidden]``."""
        seen: list[Tensor] = []
        hook = self._model.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        with float64():
            self._model(torch.tensor([tokens]))
        hook.remove()
        return seen[0][0]

    def states(self, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
        """Return the hidden states after each of ``layers``, from 1 and before the last, side by side."""
        seen: list[Tensor] = []
        hooks = [
            self._model.model.layers[layer].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
            for layer in layers
        ]
        with float64():
            self._model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        return torch.cat(seen, dim=1)

    def read_direction(self, features: Tensor) -> Floats:
        """Return the logits of states scaled to length 1, like ``readout``: the norm's epsilon has a larger effect."""
        return self.read(features / features.norm(dim=-1, keepdim=True))

    def read_normalized(self, features: Tensor) -> Floats:
        """Return the logits of states after the last norm."""
        with float64():
            logits: Floats = self._model.lm_head(features).double().numpy()
        return logits

    def read(self, features: Tensor) -> Floats:
        with float64():
            logits: Floats = self._model.lm_head(self._model.model.norm(features)).double().numpy()
        return logits


class Logits(Protocol):
    """A drafter's definition, computed without a cache."""

    def logits(self, tokens: Sequence[int], guessed: Sequence[int]) -> Floats:
        """Return the logits of the token after the branch's tokens and some draft tokens."""
        ...


def check_drafts(peer: Logits, exact: Logits, made: Sequence[Asked]) -> None:
    """Compare drafts with their definition in float64, computed with random roundings (``peer``) and without."""
    guessed = Guessed()
    for one in made:
        chain = one.wish.nodes == one.wish.depth
        assert len(one.draft) == one.wish.depth if chain else one.wish.depth <= len(one.draft) <= one.wish.nodes
        for parent, before, token, chance in paths(one.draft):
            place = len(one.tokens) + len(before)
            [rough] = compute_rounded(lambda one=one, before=before: peer.logits(one.tokens, before), runs=1)
            peer_law, law = (dict(ranked(each, one, place)) for each in (rough, exact.logits(one.tokens, before)))
            guessed.add(chance, token, peer_law, law)
            best = [t for t, p in zip(one.draft.tokens, one.draft.parents, strict=True) if p == parent]
            for taken, likeliest in zip(best, law.values(), strict=False):
                guessed.choose(law[taken], likeliest)
    guessed.check()


class Guessed:
    """Log-probabilities of draft tokens, compared with reference values in float64 and with roundings (``peer``).

    There are few draft tokens and their errors are correlated, as they come from one hidden state. The error of
    rounding is therefore the maximum over all tokens of all distributions.
    """

    def __init__(self) -> None:
        self._wrong, self._lost, self._peer = [0.0], [0.0], [0.0]

    def add(self, said: float, guess: Guess, peer: Mapping[Guess, float], exact: Mapping[Guess, float]) -> None:
        """``said``: the drafter's probability of ``guess``, a token that both references contain."""
        self._wrong.append(abs(math.log(said / exact[guess])))
        self._peer += [abs(math.log(peer[one] / exact[one])) for one in peer.keys() & exact.keys()]

    def choose(self, chosen: float, best: float) -> None:
        """Check that the chosen token is the likeliest one up to rounding."""
        self._lost.append(math.log(best / chosen))

    def check(self) -> None:
        most = MARGIN * max(self._peer)
        assert 0 < max(self._wrong) <= most
        assert max(self._lost) <= 2 * most


def bound_drafts(compute: Callable[[Asked], Floats], made: Sequence[Asked]) -> float:
    """Return the bound on the logarithm of a draft token's probability in float32, from four of the drafts.

    ``compute``: the definition of the logits. A logit errs by the bound of float32, and so does the sum that its
    exponential is divided by.
    """
    some = made[:: -(-len(made) // 4)]
    return 2 * max(float32_bound(lambda one=one: torch.from_numpy(compute(one))) for one in some)


def assert_same_drafts(
    ours: Sequence[Asked], theirs: Sequence[Asked], bound: float, definition: Logits | None = None
) -> None:
    """Compare the drafts for each text up to ties (``assert_same_draft``).

    ``definition``: of the drafter, if the branches have filters.
    """
    for one, other in pair_drafts(ours, theirs):

        def find_edge(path: tuple[int, ...], asked: Asked = one) -> float:
            if definition is None:
                return 0.0
            return find_edge_of_filters(definition.logits(asked.tokens, path), asked, len(path), bound)

        assert_same_draft(one.draft, other.draft, bound, find_edge)


def find_edge_of_filters(logits: Floats, asked: Asked, ahead: int, bound: float) -> float:
    """Return how much the logarithm of the kept candidates' sum changes with those that rounding may keep or not.

    ``ahead``: number of draft tokens before the candidates; ``bound``: of the error of a difference of two logits.
    """
    law = asked.wish.sequence.sampling
    if not law.temperature:
        return 0.0
    chances = dict(ranked(logits, asked, len(asked.tokens) + ahead))
    candidates = np.full_like(logits, -math.inf)
    candidates[list(chances)] = logits[list(chances)] / law.temperature
    surely, maybe = find_kept(candidates, bound / law.temperature, law.top_k, law.top_p, law.min_p)
    kept = (sum(chances[token] for token in np.flatnonzero(some).tolist()) for some in (maybe, surely))
    return math.log(next(kept) / next(kept))


def pair_drafts(ours: Sequence[Asked], theirs: Sequence[Asked]) -> list[tuple[Asked, Asked]]:
    """Return the drafts of two runs for the same texts.

    After a tie a branch may have accepted other tokens, and be asked about other texts: nearly all are in both.
    """
    known = {_identify(one): one for one in theirs}
    pairs = [(one, known[_identify(one)]) for one in ours if _identify(one) in known]
    assert len(pairs) > 0.9 * max(len(ours), len(theirs))
    return pairs


def _identify(asked: Asked) -> tuple[object, ...]:
    return asked.seed, asked.key, asked.temperature, tuple(asked.tokens), asked.wish.depth, asked.wish.nodes


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt()


def noisy(logits: Floats, asked: Asked, position: int) -> Floats:
    """Return a distribution's logits plus the noise of all tokens at a position of a branch."""
    if asked.temperature == 0:
        return logits
    where = (np.array([word], np.int64) for word in (asked.seed, asked.key, position))
    noise = gumbel_noise(noise_streams(*where, SAMPLE)[:, None], np.arange(len(logits)))[0]
    scores: Floats = logits + NOISE * asked.temperature * noise
    return scores


def ranked(logits: Floats, asked: Asked, position: int) -> list[tuple[int, float]]:
    """Return the 64 likeliest tokens except negligible ones, with their softmax over noisy logits, largest first."""
    likeliest = np.argsort(-logits)[:64]
    likeliest = likeliest[logits[likeliest] >= logits.max() - REACH * max(asked.temperature, 1)]
    scores = noisy(logits, asked, position)[likeliest]
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return sorted(zip(likeliest.tolist(), weights.tolist(), strict=True), key=lambda pair: -pair[1])


def paths(draft: Draft) -> Iterator[tuple[int, list[int], int, float]]:
    """Yield each draft token with its parent, the draft tokens before it, itself and its probability."""
    for index, (token, parent, chance) in enumerate(zip(draft.tokens, draft.parents, draft.probs, strict=True)):
        assert parent < index
        yield parent, draft.path(parent), token, chance
