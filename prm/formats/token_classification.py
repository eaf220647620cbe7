"""Token-classification PRMs as trained by TRL's ``PRMTrainer``: a label at the separator that ends each step.

The checkpoint's ``reasoner_prm`` holds the ``separator`` and the index of the ``positive_label``. The question is
rendered with the chat template; prompt, steps and separators are tokenised one by one, as in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.protocol.types import EngineClient, ModelInfo
from prm.formats.base import Format


class TokenClassification(Format):
    name = "token_classification"
    kind = "classify"

    def __init__(self, engine: EngineClient, info: ModelInfo, notes: Mapping[str, object]) -> None:
        others = dict(notes)
        self.info = info
        try:
            separator, label = others.pop("separator"), others.pop("positive_label")
        except KeyError as missing:
            raise self.refuse(f"its config.json needs {missing} in 'reasoner_prm'") from None
        if not isinstance(separator, str) or not separator or not isinstance(label, int) or label < 0:
            raise self.refuse("in 'reasoner_prm' the separator must be a text and positive_label the index of a label")
        super().__init__(engine, info, others)
        self.separator = self.end = separator
        self.positive_index = label

    def probability(self, logits: Sequence[float]) -> float:
        if self.positive_index >= len(logits):
            raise self.refuse(f"positive_label is {self.positive_index}, but it has {len(logits)} labels")
        return super().probability(logits)
