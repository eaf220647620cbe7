"""transformers computed entirely in float64, and the error of transformers in float32 against it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from engine.core.reference import float64
from engine.protocol.types import ScoreItem
from tests.closeness import assert_rounded
from tests.engine.helpers import SMALL, Harness, score
from tests.rounding import MARGIN, compute_rounded
from tests.seeds import shift


def _loader(folder: Path) -> Any:
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    return AutoModelForTokenClassification if "TokenClassification" in architecture else AutoModelForCausalLM


@lru_cache
def reference(folder: Path) -> Any:
    """Return the checkpoint as transformers computes it in float32."""
    return _loader(folder).from_pretrained(folder, dtype=torch.float32).eval()


@lru_cache
def exact_reference(folder: Path) -> Any:
    """Return the checkpoint in float64. Call within ``float64`` only."""
    with float64():
        return _loader(folder).from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()


def peer_logits(folder: Path, tokens: Sequence[int]) -> Tensor:
    """Return transformers' logits in float32, ``[tokens, vocab]``."""
    with torch.no_grad():
        logits: Tensor = reference(folder)(torch.tensor([tokens])).logits[0]
    return logits


def exact_logits(folder: Path, tokens: Sequence[int]) -> Tensor:
    """Return the logits in float64, ``[tokens, vocab]``."""
    with float64():
        logits: Tensor = exact_reference(folder)(torch.tensor([tokens])).logits[0]
    return logits


def assert_equal_logits(ours: Tensor, folder: Path, tokens: Sequence[int], start: int = 0) -> None:
    """Check that logits from position ``start`` on err by no more than float32 does."""
    assert_rounded(ours, exact_logits(folder, tokens)[start:], float32_loss(folder).logit)


@lru_cache
def _rounded(folder: Path) -> tuple[Tensor, Tensor]:
    """Return the logits of a text in float64, and those of several runs with random roundings."""
    tokens = _text(folder, 250)
    with float64():
        model = exact_reference(folder)
    runs = compute_rounded(lambda: model(torch.tensor([tokens])).logits[0])
    return exact_logits(folder, tokens), torch.stack(runs)


@lru_cache
def float32_share(folder: Path) -> float:
    """Return the relative difference in the Euclidean norm that two runs in float32 may have along a text."""
    exact, runs = _rounded(folder)
    return 2 * MARGIN * float((runs - exact).flatten(1).norm(dim=1).max() / exact.norm())


class Loss(NamedTuple):
    """Bounds on the error of a checkpoint in float32: ``MARGIN`` times the worst of random roundings in float64."""

    logit: float
    logprob: float


@lru_cache
def float32_loss(folder: Path) -> Loss:
    """Return the bounds of the error of float32 along a text of the engine's tests."""
    exact, runs = _rounded(folder)
    differences = runs - exact, runs.log_softmax(-1) - exact.log_softmax(-1)
    return Loss(*(MARGIN * float(one.abs().max()) for one in differences))


@lru_cache
def gap(folder: Path, kv_dtype: str = "auto") -> float:
    """Return the allowed difference of a log-probability between two runs that cut their steps in different places.

    In float32 each may have the error ``float32_loss``. With 8-bit keys and values a number that lies between two codes
    may also round differently in the two runs, which moves one number of thousands by a step, while rounding itself
    moves each by up to a half. The root mean square of the effect of all rounding bounds the effect of one such number.
    """
    if kv_dtype == "auto":
        return 2 * float32_loss(folder).logprob
    tokens = tuple(_text(folder, 120))
    options = (replace(SMALL, kv_dtype=dtype, device="cpu") for dtype in ("auto", kv_dtype))
    plain, rounded = (_logprobs(Harness(folder, one), tokens) for one in options)
    return float((rounded - plain).square().mean().sqrt())


def _logprobs(harness: Harness, tokens: Sequence[int]) -> Tensor:
    item = ScoreItem(tuple((token,) for token in tokens), tuple(range(len(tokens))))
    [result] = harness.score(score(item, token_ids=range(harness.core.model.info.vocab_size)))
    return torch.tensor(result.values, dtype=torch.float64).log_softmax(-1)


def _text(folder: Path, size: int) -> list[int]:
    vocab = min(360, json.loads((folder / "config.json").read_text())["vocab_size"])
    tokens: list[int] = torch.randint(3, vocab, (size,), generator=torch.Generator().manual_seed(shift(0))).tolist()
    return tokens
