"""Sequences sampled with speculation follow the exact distribution; planted bugs show that the test detects errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.attention.layer import HeadShape
from engine.attention.plan import TreeMask
from engine.cache.paged_kv import KVCache
from engine.core.engine_core import EngineCore
from engine.core.step import Step
from engine.models.load import load_model
from engine.protocol.types import Branch, Completion
from engine.runner import batch, sample_step
from engine.runner.sample_step import SampledTokens
from engine.sampling import sampler
from engine.sampling.logits_processors import LogitsRow, apply_logits_processors
from engine.sampling.sampler import Floats, Ints
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.control.controller import FixedController
from engine.speculation.drafter import Drafter, DraftRequest, HiddenStateNeeds, StepResult
from engine.speculation.load import load_drafter
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import SMALL, Harness, generate
from tests.engine.speculation.dflash_heads import dflash_parts
from tests.engine.speculation.eagle3_heads import eagle3_parts
from tests.engine.speculation.heads import eagle_parts, medusa_parts, save_head
from tests.long import mostly_long, mostly_long_grid
from tests.seeds import unshifted

pytestmark = unshifted("statistical claims")

PROMPT = (17, 5, 90, 41, 5)
LENGTH = 3
VOCABULARY, BIAS = (5, 17, 41, 90, 158), 60.0
"""The only tokens that are ever sampled, and the bias that raises their logits."""
TEMPERATURE, TOP_K, TOP_P, PRESENCE = 3.0, 4, 0.97, -2.0
LAW = {
    "temperature": TEMPERATURE,
    "top_k": TOP_K,
    "top_p": TOP_P,
    "presence_penalty": PRESENCE,
    "logit_bias": tuple((token, BIAS) for token in VOCABULARY),
    "ignore_eos": True,
}
SHAPES = {"chain": (3, 3), "tree": (3, 9)}
SAMPLES = 3000
SURELY, HARDLY = 1e-3, 1e-9
"""p-values: a correct distribution stays above the first, a wrong one falls below the second."""

Law = dict[tuple[int, ...], float]


def exact_law(folder: Path) -> Law:
    """Return the probability of every sequence, from transformers' logits in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    law: Law = {(): 1.0}
    with torch.inference_mode():
        for _ in range(LENGTH):
            prefixes = list(law)
            logits = model(torch.tensor([PROMPT + prefix for prefix in prefixes])).logits[:, -1].numpy()
            law = {
                (*prefix, token): law[prefix] * chance
                for prefix, row in zip(prefixes, logits, strict=True)
                for token, chance in next_law(row, prefix)
            }
    assert sum(law.values()) == pytest.approx(1)
    return law


def next_law(logits: npt.NDArray[np.float64], written: tuple[int, ...]) -> Iterator[tuple[int, float]]:
    """Yield next tokens with probabilities: bias, presence penalty, temperature, top-k, top-p by their definitions."""
    logits[list(VOCABULARY)] += BIAS
    logits[sorted(set(written))] -= PRESENCE
    order = np.argsort(-logits)[:TOP_K]
    weights = np.exp((logits[order] - logits[order[0]]) / TEMPERATURE)
    weights /= weights.sum()
    kept = 1 + int((weights.cumsum() < TOP_P).sum())
    yield from zip(order[:kept].tolist(), (weights[:kept] / weights[:kept].sum()).tolist(), strict=True)


def p_value(drawn: Counter[tuple[int, ...]], law: Law) -> float:
    """Return the p-value of Pearson's chi-squared test; sequences expected less than eight times form one class."""
    if not set(drawn) <= set(law):  # a sequence of probability zero
        return 0.0
    total = drawn.total()
    rare = [sequence for sequence, chance in law.items() if chance * total < 8]
    common = [sequence for sequence in law if sequence not in set(rare)]
    observed = [drawn[sequence] for sequence in common] + [sum(drawn[sequence] for sequence in rare)]
    expected = [law[sequence] * total for sequence in common] + [sum(law[sequence] for sequence in rare) * total]
    assert len(common) > 20
    return float(chisquare(observed, expected).pvalue)


def draw(folder: Path, drafter: Drafter | None, shape: str = "chain") -> Counter[tuple[int, ...]]:
    """Generate from branches with different noise and count the sequences."""
    harness = Harness(folder, SMALL)
    if drafter is not None:
        harness.core.start_speculation(drafter, FixedController(*SHAPES[shape]))
    drawn: Counter[tuple[int, ...]] = Counter()
    for start in range(0, SAMPLES, 500):
        keys = range(start, start + 500)
        events = harness.submit(generate(PROMPT, [Branch(seed=3, key=key, max_tokens=LENGTH) for key in keys], **LAW))
        while harness.core.has_work:
            harness.core.step()
        drawn.update(event.token_ids for event in events if isinstance(event, Completion))
    assert drawn.total() == SAMPLES
    if drafter is not None:
        assert harness.core.speculation_stats.accepted > SAMPLES / 10
    return drawn


class Likeliest:
    """Drafts the likeliest continuations under the exact distribution, the best first, without noise."""

    kind = "likeliest"
    hidden_state_needs = HiddenStateNeeds.ALL
    observed_layers: tuple[int, ...] = ()
    key_shapes: tuple[HeadShape, ...] = ()

    def __init__(self, law: Law) -> None:
        self._chances: Counter[tuple[int, ...]] = Counter()
        for sequence, chance in law.items():
            for end in range(1, LENGTH + 1):
                self._chances[sequence[:end]] += chance  # type: ignore[assignment]

    def reset(self, cache: KVCache) -> None:
        pass

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        return [self._guess(tuple(wish.sequence.generated), wish.depth, wish.nodes) for wish in wishes]

    def _guess(self, written: tuple[int, ...], depth: int, nodes: int) -> Draft:
        places = {written: -1}
        parents: list[int] = []
        behind = sorted((one for one in self._chances if one[: len(written)] == written), key=len)
        while len(parents) < nodes:
            able = [
                one for one in behind if one not in places and one[:-1] in places and len(one) <= len(written) + depth
            ]
            if not able or (nodes == depth and len(able[0]) <= len(written) + len(parents)):
                break
            able = [one for one in able if nodes > depth or len(one) == len(written) + len(parents) + 1]
            best = max(able, key=lambda one: self._chances[one])
            parents.append(places[best[:-1]])
            places[best] = len(parents) - 1
        tokens = [one[-1] for one, place in places.items() if place >= 0]
        return Draft(tuple(tokens), tuple(parents), (0.5,) * len(tokens))

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        pass

    def release(self, sequence: GenerateSequence) -> None:
        pass

    def warm_ups(self) -> list[Callable[[], None]]:
        return []

    def clear_cache(self) -> None:
        pass


@pytest.fixture(scope="module")
def law(checkpoints: Checkpoints) -> Law:
    return exact_law(checkpoints("qwen3"))


def test_plain_decoding_follows_the_exact_distribution(checkpoints: Checkpoints, law: Law) -> None:
    assert p_value(draw(checkpoints("qwen3"), None), law) > SURELY


@pytest.mark.parametrize("shape", list(SHAPES))
def test_likeliest_continuations_as_drafts_keep_the_exact_distribution(
    checkpoints: Checkpoints, law: Law, shape: str
) -> None:
    assert p_value(draw(checkpoints("qwen3"), Likeliest(law), shape), law) > SURELY


@pytest.mark.parametrize(
    ("kind", "shape"),
    mostly_long_grid(["ngram", "draft_model", "medusa", "eagle", "eagle3", "dflash"], SHAPES, every=3),
)
def test_every_drafter_keeps_the_exact_distribution(
    checkpoints: Checkpoints, law: Law, tmp_path: Path, kind: str, shape: str
) -> None:
    parts = {"medusa": medusa_parts, "eagle": eagle_parts, "eagle3": eagle3_parts, "dflash": dflash_parts}
    wanted = kind
    if kind in parts:
        wanted = f"{kind}={save_head(tmp_path / kind, *parts[kind]())}"
    elif kind == "draft_model":
        wanted = f"{kind}={checkpoints('llama')}"
    folder = checkpoints("qwen3")
    target = load_model(folder, lambda config: config.max_context)
    drafter = load_drafter(wanted, folder, target, context=target.config.max_context)
    assert p_value(draw(folder, drafter, shape), law) > SURELY


def plant_belief(patch: pytest.MonkeyPatch) -> None:
    original = EngineCore._append_sampled_tokens

    def append(core: EngineCore, step: Step, drawn: list[SampledTokens]) -> None:
        for one in drawn:
            if one.draft:
                one.tokens[0] = one.draft.tokens[0]
        original(core, step, drawn)

    patch.setattr(EngineCore, "_append_sampled_tokens", append)


def plant_stale_penalties(patch: pytest.MonkeyPatch) -> None:
    def apply_without_drafts(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        apply_logits_processors(logits, [row._replace(draft_prefix=()) for row in rows])

    patch.setattr(sample_step, "apply_logits_processors", apply_without_drafts)


def plant_repeated_noise(patch: pytest.MonkeyPatch) -> None:
    original = sampler.sample

    def sample(logits: Tensor, laws: SamplingTensors, where: NoiseKeys) -> tuple[Ints, Floats]:
        """Sample all rows of a step with the noise of its first position."""
        first: dict[int, int] = {}
        places = [
            first.setdefault(key, at) for key, at in zip(where.key.tolist(), where.position.tolist(), strict=True)
        ]
        return original(logits, laws, where._replace(position=np.array(places)))

    patch.setattr(sample_step, "sample", sample)


def plant_no_tree_mask(patch: pytest.MonkeyPatch) -> None:
    original = batch._build_tree_mask

    def tree(draft: Draft) -> TreeMask:
        right = original(draft)
        return TreeMask(right.depths, np.tri(len(right.depths), dtype=np.bool_))

    patch.setattr(batch, "_build_tree_mask", tree)


def plant_unmoved_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "move_tokens", lambda cache, moves: None)


@pytest.mark.long  # a test of the tests
@pytest.mark.parametrize(
    ("plant", "shape"), mostly_long_grid([plant_belief, plant_stale_penalties, plant_repeated_noise], SHAPES, every=5)
)
def test_a_planted_bug_is_detected(
    checkpoints: Checkpoints,
    law: Law,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    shape: str,
) -> None:
    plant(monkeypatch)
    assert p_value(draw(checkpoints("qwen3"), Likeliest(law), shape), law) < HARDLY


@pytest.mark.long  # a test of the tests
@pytest.mark.parametrize("plant", mostly_long([plant_no_tree_mask, plant_unmoved_keys], every=2))
def test_a_bug_planted_in_trees_is_detected(
    checkpoints: Checkpoints, law: Law, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    assert p_value(draw(checkpoints("qwen3"), Likeliest(law), "tree"), law) < HARDLY
