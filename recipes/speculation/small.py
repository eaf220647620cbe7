"""Draft model for training: a small model distilled from the target on the target's own texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from recipes.bundled import model
from recipes.speculation.target import Target

KIND = "draft_model"


class Small(nn.Module):
    """A small decoder that does not read the target's hidden states.

    Initialised from an existing model, with added layers that are the identity at first (``model.grow``)."""

    def __init__(self, target: Target, start: Path, layers: int) -> None:
        super().__init__()
        small, _ = model.load(start)
        if small.shape.vocabulary != target.config.vocab_size:
            raise SystemExit(
                f"{start}: the vocabulary is {small.shape.vocabulary}, but the target's is {target.config.vocab_size}"
            )
        self.backbone = model.Backbone(replace(small.shape, layers=layers))
        model.initialise(self.backbone, {}, seed=1)
        model.grow(small, self.backbone)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits ``[texts, tokens, vocab]`` after each of ``ids`` ``[texts, tokens]`` (right-padded)."""
        logits: Tensor = self.backbone(ids) @ self.backbone.embedding.T
        return logits

    def save(self, folder: Path, _: Target) -> None:
        """Write the checkpoint for ``engine.speculation.drafters.draft_model``."""
        folder.mkdir(parents=True, exist_ok=True)
        model.export(self.backbone, folder)
        path = folder / "config.json"
        path.write_text(json.dumps({"kind": KIND, **json.loads(path.read_text())}, indent=2) + "\n")
