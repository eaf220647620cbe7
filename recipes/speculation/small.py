"""A draft model as it is trained: a small model that learns the target's law from the target's own texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from recipes.bundled import model
from recipes.speculation.target import Target

KIND = "draft_model"


class Small(nn.Module):
    """A small decoder that knows nothing of the target's states. It begins as one that is there, with layers added that
    change nothing yet (``model.grow``)."""

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
        """The logits ``[texts, tokens, vocab]`` after each of the tokens ``[texts, tokens]``, padded on the right."""
        logits: Tensor = self.backbone(ids) @ self.backbone.embedding.T
        return logits

    def save(self, folder: Path, _: Target) -> None:
        """The checkpoint for ``engine.speculation.drafters.draft_model``."""
        folder.mkdir(parents=True, exist_ok=True)
        model.export(self.backbone, folder)
        path = folder / "config.json"
        path.write_text(json.dumps({"kind": KIND, **json.loads(path.read_text())}, indent=2) + "\n")
