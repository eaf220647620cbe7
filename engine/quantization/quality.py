"""How far a quantised model is from the one that it was made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.models.interface import Batch, Model
from engine.models.load import load_model
from engine.quantization.calibration import DenseAttend


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over the tokens of texts."""

    perplexity: float
    """Of the texts under the model."""
    divergence: float
    """Kullback-Leibler divergence of the model's law of the next token from the original's, in nats."""
    agreement: float
    """Part of the tokens whose likeliest successor is the original's."""


def open_model(folder: Path) -> Model:
    """The model as the engine would load it."""
    return load_model(folder, lambda config: config.max_context)


def logits(model: Model, tokens: Sequence[int]) -> Tensor:
    """``[tokens, vocab]`` of one text."""
    with torch.inference_mode():
        batch = Batch(torch.tensor(tokens), torch.arange(len(tokens)))
        return model.compute_logits(model.forward(batch, DenseAttend(model.config.attention)))


def compare(original: Model, model: Model, texts: Iterable[tuple[Sequence[int], int]]) -> Quality:
    """``model`` beside ``original`` on texts: token ids, and the place from which on they count (1 or more)."""
    count, surprise, divergence, agreed = 0, 0.0, 0.0, 0
    for tokens, start in texts:
        laws = (logits(one, tokens)[start - 1 : -1].double() for one in (original, model))
        right, found = (torch.log_softmax(law, dim=-1) for law in laws)
        count += len(found)
        surprise -= float(found.gather(1, torch.tensor(tokens[start:])[:, None]).sum())
        divergence += float((right.exp() * (right - found)).sum())
        agreed += int((right.argmax(-1) == found.argmax(-1)).sum())
    return Quality(math.exp(surprise / count), divergence / count, agreed / count)
