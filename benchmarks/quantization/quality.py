"""Compare a quantised model with its original."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.models.interface import Batch, Model
from engine.models.load import load_model
from engine.quantization.calibration import DenseAttention


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over the tokens of some texts."""

    perplexity: float
    divergence: float
    """Kullback-Leibler divergence of the model's next-token distribution from the original's, in nats."""
    agreement: float
    """Share of the tokens whose most likely successor is the original's."""


def open_model(folder: Path) -> Model:
    """Load a model as the engine does."""
    return load_model(folder, lambda config: config.max_context)


def compute_text_logits(model: Model, tokens: Sequence[int]) -> Tensor:
    """Return the logits ``[tokens, vocab]`` of one text."""
    with torch.inference_mode():
        batch = Batch(torch.tensor(tokens), torch.arange(len(tokens)))
        return model.compute_logits(model.forward(batch, DenseAttention(model.config.attention)))


def compare(original: Model, model: Model, texts: Iterable[tuple[Sequence[int], int]]) -> Quality:
    """Compare ``model`` with ``original`` on texts: token ids, and the first index that counts (1 or more)."""
    num_tokens, negative_log_likelihood, divergence, num_agreed = 0, 0.0, 0.0, 0
    for tokens, start in texts:
        logits = (compute_text_logits(each, tokens)[start - 1 : -1].double() for each in (original, model))
        expected, actual = (torch.log_softmax(rows, dim=-1) for rows in logits)
        num_tokens += len(actual)
        negative_log_likelihood -= float(actual.gather(1, torch.tensor(tokens[start:])[:, None]).sum())
        divergence += float((expected.exp() * (expected - actual)).sum())
        num_agreed += int((expected.argmax(-1) == actual.argmax(-1)).sum())
    return Quality(math.exp(negative_log_likelihood / num_tokens), divergence / num_tokens, num_agreed / num_tokens)
