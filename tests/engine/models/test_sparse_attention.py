"""Sparse attention with an indexer computes transformers' logits, for texts of which no indexer's scores nearly tie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.reference import float64
from tests.closeness import assert_rounded
from tests.engine.conftest import SPARSE, Checkpoints
from tests.engine.exact import assert_equal_logits, exact_reference
from tests.engine.helpers import Harness
from tests.engine.models.test_models import engine_logits, random_tokens
from tests.rounding import MARGIN, compute_rounded

NEAR = 1e-4
"""Distance of scores, as a part of a query's largest one, that rounding in float32 may turn round: a hundred times
what it does to one product."""


def find_smallest_gap(folder: Path, tokens: tuple[int, ...]) -> float:
    """Return the smallest distance between the last score that is chosen and the first that is not."""
    model, gaps = exact_reference(folder), [1.0]

    def observe(indexer: Any, inputs: tuple[Any, ...], kept: dict[str, Any]) -> None:
        del kept
        hidden, latents, (cos, sin), mask, *_ = inputs
        every = indexer.index_topk
        indexer.index_topk = len(tokens)
        seen: list[Tensor] = []
        topk = Tensor.topk

        def keep(scores: Tensor, *args: Any, **options: Any) -> Any:
            seen.append(scores)
            return topk(scores, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "topk", keep)
            type(indexer).forward(indexer, hidden, latents, (cos, sin), mask, None)
        indexer.index_topk = every
        ranks = seen[0][0].sort(dim=-1, descending=True).values[every:]  # the queries that leave tokens out
        scale = ranks.masked_fill(ranks.isinf(), 0).abs().amax(dim=-1)
        distances = (ranks[:, every - 1] - ranks[:, every]) / scale
        gaps.append(float(distances.min()))

    indexers = [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]
    hooks = [indexer.register_forward_pre_hook(observe, with_kwargs=True) for indexer in indexers]
    with float64():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return min(gaps)


@pytest.mark.parametrize("kind", SPARSE)
def test_logits_of_a_prompt_and_of_what_follows_it_are_those_of_transformers(
    checkpoints: Checkpoints, kind: str
) -> None:
    folder = checkpoints(kind)
    texts = (random_tokens(70, number) for number in range(40))
    distinct = [text for text in texts if find_smallest_gap(folder, text) > NEAR]
    assert len(distinct) >= 3
    for text in distinct[:3]:
        harness = Harness(folder)
        prompt, decoded = engine_logits(harness, text[:41]), engine_logits(harness, text, start=41)
        assert_equal_logits(torch.cat((prompt, decoded)), folder, text)


def test_what_the_indexer_leaves_out_changes_the_logits(checkpoints: Checkpoints) -> None:
    """Otherwise the comparison would prove nothing."""
    harness, text = Harness(checkpoints("deepseek_v32")), random_tokens(70, 1)
    sparse = engine_logits(harness, text)
    model = exact_reference(checkpoints("deepseek_v32"))
    with pytest.MonkeyPatch.context() as patch, float64():
        for layer in model.model.layers:
            patch.setattr(layer.self_attn.indexer, "index_topk", len(text))
        dense = model(torch.tensor([text])).logits[0]
        runs = compute_rounded(lambda: model(torch.tensor([text])).logits[0])
    bound = MARGIN * float((torch.stack(runs) - dense).abs().max())
    assert_rounded(sparse[:16], dense[:16], bound)
    assert float((sparse[40:] - dense[40:]).abs().max()) > bound
