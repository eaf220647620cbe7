"""Evaluation of drafters on held-out texts, and their model card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recipes.speculation.kinds import Head
from recipes.speculation.measure import GRID, kind_of, tokens_per_step
from recipes.speculation.objective import Batch, collate, levels
from recipes.speculation.small import Small
from recipes.speculation.target import Target
from recipes.speculation.texts import Text

ROWS = 16
"""Number of held-out texts per batch."""


@dataclass(frozen=True, slots=True)
class LevelReport:
    """Metrics of one level of a head, averaged over all predictions in the texts."""

    loss: float
    """Kullback-Leibler divergence from the target's distribution, in nats."""
    same: float
    """Fraction of predictions whose likeliest token is the target's."""
    overlap: float
    """Overlap of the two distributions: the sum of the smaller probabilities."""
    reached: float
    """Expected product of the overlaps up to this level: approximate probability that a chain is accepted so far."""


@torch.inference_mode()
def held_out(head: Head | Small, target: Target, texts: Sequence[Text]) -> list[LevelReport]:
    """Evaluate a head on held-out texts; return a report for each level."""
    sums: list[Tensor] = []
    for batch in _batches(texts, target.device):
        reached = torch.ones(batch.ids.shape, dtype=torch.float64)
        for number, level in enumerate(levels(head, target, batch)):
            overlap = torch.minimum(level.head, level.target).exp().sum(-1).double().cpu()
            roots = level.roots.cpu()
            reached = reached[:, : roots.shape[1]]
            reached[roots] *= overlap
            same = level.head.argmax(-1) == level.target.argmax(-1)
            values = (level.loss * len(overlap), same.sum(), overlap.sum(), reached[roots].sum(), len(overlap))
            if number == len(sums):
                sums.append(torch.zeros(5, dtype=torch.float64))
            sums[number] += torch.tensor([float(value) for value in values])
    return [LevelReport(*(total[:4] / total[4]).tolist()) for total in sums]


def write_card(
    folder: Path, head: Head | Small, target: Target, texts: Sequence[Text], cost: dict[str, float | int]
) -> None:
    """Write ``README.md`` beside the weights."""
    (folder / "README.md").write_text("\n".join(_card(folder, head, target, texts, cost)) + "\n")


def _card(
    folder: Path, head: Head | Small, target: Target, texts: Sequence[Text], cost: dict[str, float | int]
) -> Iterator[str]:
    kind = kind_of(folder)
    size = (folder / "model.safetensors").stat().st_size
    yield "---\nlicense: apache-2.0\nlibrary_name: reasoner\n---\n"
    yield f"# Drafter ({kind}) for {target.folder.name}\n"
    yield f"Drafts tokens for `{target.folder.name}`, which verifies every draft: it changes the speed, never the text."
    yield (
        f"{ABOUT[kind]} {sum(p.numel() for p in head.parameters()) / 1e6:.2f}M parameters "
        f"(fp16, {size / 1e3:.0f} kB).\n"
    )
    yield "## Training\n"
    yield (
        f"`python -m recipes.speculation.train --target {target.folder} --kind {kind}`, on texts that the target wrote "
        f"itself, two of three sampled and one greedy: {cost['steps']} steps, {cost['tokens'] / 1e6:.1f}M generated "
        f"tokens read, {cost['seconds'] / 60:.0f} minutes ({target.device}).\n"
    )
    yield f"## Held-out results\n\n{len(texts)} held-out texts, sampled; every position of a text is a start.\n"
    reports = held_out(head, target, texts)
    yield "| draft token | KL, nats | same likeliest token | overlap of the distributions | chain accepted so far |"
    yield "|---:|---:|---:|---:|---:|"
    for number, one in enumerate(reports, 1):
        yield f"| {number} | {one.loss:.3f} | {one.same:.3f} | {one.overlap:.3f} | {one.reached:.3f} |"
    if len(reports) > 1:
        yield f"\nExpected accepted tokens of a chain of {len(reports)}: {sum(one.reached for one in reports):.2f}."
    yield ""
    if target.device == "cpu":
        yield from _engine_table(folder, target, texts)


def _engine_table(folder: Path, target: Target, texts: Sequence[Text]) -> Iterator[str]:
    """Yield the rows of a table of this engine's tokens per step."""
    yield "Tokens per step of a branch on the engine, the first from the prompt included (plain decoding: 1):\n"
    yield "| draft | greedy | sampled |\n|---|---:|---:|"
    for shape in GRID:
        found = [tokens_per_step(target.folder, folder, texts, shape, greedy=greedy) for greedy in (True, False)]
        name = f"chain of {shape[0]}" if shape[0] == shape[1] else f"tree of {shape[1]}, {shape[0]} deep"
        yield f"| {name} | " + " | ".join(f"{value:.2f}" for value in found) + " |"


ABOUT = {
    "medusa": "Heads that predict the next tokens all at once from one hidden state (Cai et al. 2024). Embedding and "
    "head are the target's.",
    "draft_model": "A smaller model of the same vocabulary, grown from a bundled one: it reads the text alone.",
    "eagle3": "A decoder layer on hidden states of three layers, which drafts on from its own outputs (EAGLE-3, Li et "
    "al. 2025). The embedding is the target's.",
    "eagle": "A decoder layer that predicts the next hidden states one by one (EAGLE, Li et al. 2024). Embedding and "
    "head are the target's.",
}


def _batches(texts: Sequence[Text], device: str) -> Iterator[Batch]:
    ordered = sorted(texts, key=lambda text: len(text.prompt) + len(text.tokens))
    return (collate(ordered[start : start + ROWS], device) for start in range(0, len(ordered), ROWS))
