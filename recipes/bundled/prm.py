"""Train the process reward model on exact step labels, in two phases, and export it.

    python -m recipes.bundled.prm --phase attempts    synthetic attempts, constant learning rate
    python -m recipes.bundled.prm --phase samples     from there: on samples of the policy, rate to zero

Two auxiliary heads are dropped at export: the values that can still be reached from the numbers left (Countdown), and
the true result at each " = " (both families).
"""

from __future__ import annotations

import json
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.bundled import WORK, model
from recipes.bundled import tokenizer as tok
from recipes.bundled.data import Batch, Example, prm_example
from recipes.bundled.policy import numbers
from recipes.bundled.sample import SampledAttempts
from recipes.bundled.train import Plan, export, parse_options, resume, train

SEED = 2
PLANS = {"attempts": Plan(steps=3800, decay_from=1.0), "samples": Plan(steps=4000, decay_from=0.2)}


class Scorer(nn.Module):
    """A backbone with the score head and the two auxiliary heads."""

    def __init__(self, shape: model.Shape) -> None:
        super().__init__()
        self.backbone = model.Backbone(shape)
        self.score = nn.Parameter(torch.zeros(2, shape.width))
        self.score_bias = nn.Parameter(torch.zeros(2))
        self.reach = nn.Parameter(torch.zeros(200, shape.width))
        self.reach_bias = nn.Parameter(torch.full((200,), -1.0))
        self.result = nn.Parameter(torch.eye(shape.width))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        hidden = self.backbone(batch.ids, batch.positions, batch.segments).flatten(0, 1)
        logits = F.linear(hidden[batch.label_at], self.score, self.score_bias)
        parts = {"label": F.cross_entropy(logits, torch.stack((1 - batch.labels, batch.labels), dim=1))}
        if len(batch.targets):
            guess = F.linear(hidden[batch.target_at], self.result) @ self.backbone.embedding.T
            parts["result"] = 0.2 * F.cross_entropy(guess, batch.targets)
        if len(batch.masks):
            reach = F.linear(hidden[batch.mask_at], self.reach, self.reach_bias)
            parts["reach"] = 1.0 * F.binary_cross_entropy_with_logits(reach, batch.masks)
        return parts

    def named_parameters(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
        """Yield the backbone's parameters without a name prefix, so that the optimizer finds its matrices."""
        for name, p in super().named_parameters(*args, **kwargs):  # type: ignore[arg-type]
            yield name.removeprefix("backbone."), p


def main() -> None:
    options, plan = parse_options(__doc__, "--phase", PLANS)
    tokenizer = tok.load()
    scorer = Scorer(model.shape_of("prm", tokenizer.get_vocab_size()))
    model.initialise(scorer.backbone, numbers(tokenizer), SEED)
    folder = WORK / f"prm-{options.phase}"
    if options.phase == "samples" and not (folder / "state.safetensors").exists():
        resume(WORK / "prm-attempts" / "state.safetensors", scorer)
    sampled = SampledAttempts(tokenizer) if options.phase == "samples" and not options.export else None

    def examples(first: int, count: int, progress: float) -> list[Example]:
        found: list[Example] = []
        if sampled is not None:
            sampled.refresh()
        for index in range(first, first + count):
            rng = random.Random(f"source/{SEED}/{index}")
            if sampled is not None and (progress > 0.75 or rng.random() < 0.7):
                found.append(sampled.example(rng))
            else:
                found.append(prm_example(tokenizer, SEED if sampled is None else SEED + 1, index))
        return found

    if options.export:
        resume(folder / "state.safetensors", scorer)
    else:
        cost = train(folder, scorer, plan, examples, scorer.losses, seed=SEED, average=150)
        (folder / "cost.json").write_text(json.dumps(cost) + "\n")
    print(f"exported to {export('prm', scorer.backbone, score=(scorer.score, scorer.score_bias))}")


if __name__ == "__main__":
    main()
