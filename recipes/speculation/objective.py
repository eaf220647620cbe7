"""Training objective: the target's next-token distributions, predicted from a drafter's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.speculation.kinds import Head
from recipes.speculation.small import Small
from recipes.speculation.target import Target
from recipes.speculation.texts import Text


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts padded on the right.

    ``start`` and ``end`` ``[texts, 1]``: position of each text's first generated token, and the one after its last."""

    ids: Tensor
    start: Tensor
    end: Tensor


class Level:
    """Log-probabilities of a head at one level and of the target at the same positions, ``[predictions, vocab]`` each.

    ``roots``: mask ``[texts, positions]`` of the positions from which the head predicts.
    """

    def __init__(self, head: Tensor, target: Tensor, roots: Tensor) -> None:
        self.head, self.target, self.roots = head, target, roots

    @property
    def loss(self) -> Tensor:
        """Return the mean Kullback-Leibler divergence of the head's distribution from the target's, in nats."""
        return (self.target.exp() * (self.target - self.head)).sum(-1).mean()


def levels(head: Head | Small, target: Target, batch: Batch) -> Iterator[Level]:
    """Yield the levels of a head on a batch, at all positions whose token and the one before it were generated.

    A draft model has one level, since it predicts all draft tokens in the same way."""
    features = target.features(batch.ids)
    place = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    # The token at a position was sampled from the distribution at the position before.
    wanted = (place >= batch.start) & (place < batch.end - 1)
    with torch.no_grad():
        distributions = target.read(features[wanted]).log_softmax(-1)
    if isinstance(head, Small):
        yield Level(head(batch.ids)[wanted].log_softmax(-1), distributions, wanted)
        return
    row = (wanted.flatten().cumsum(0) - 1).view_as(wanted)
    for level, state in enumerate(head(head.inputs(target, features), target.embed(batch.ids))):
        count = state.shape[1] - 1
        roots = (place[:count] >= batch.start - 1) & (place[:count] + 2 + level < batch.end)
        if not roots.any():
            return
        distribution = row[:, 1 + level : 1 + level + count][roots]
        yield Level(head.read(target, state[:, :count][roots]).log_softmax(-1), distributions[distribution], roots)


def collate(texts: Sequence[Text], device: str) -> Batch:
    """Return the texts as one batch."""
    rows = [text.prompt + text.tokens for text in texts]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
    start, end = torch.tensor([[len(text.prompt) for text in texts], list(map(len, rows))])[..., None]
    return Batch(ids.to(device), start.to(device), end.to(device))
