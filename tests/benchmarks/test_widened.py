"""A widened checkpoint computes the same function as the small one."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.checkpoint import Size
from benchmarks.engine.speculation import BUNDLED
from benchmarks.engine.widened import widened
from tests.engine.exact import float32_loss
from tests.seeds import shift


def test_transformers_computes_the_same_logits_for_the_widened_model(tmp_path: Path) -> None:
    source = BUNDLED / "policy"
    size = Size(hidden=320, layers=6, heads=12, kv_heads=6, head_dim=32, intermediate=640, vocab=826, context=512)
    folder = widened("wide", source, size, tmp_path)
    ids = torch.randint(826, (2, 100), generator=torch.Generator().manual_seed(shift(0)))
    with torch.inference_mode():
        small, large = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (source, folder))
        assert large.num_parameters() > 8 * small.num_parameters()
        difference = (small(ids).logits - large(ids).logits).abs().max().item()
    assert difference <= float32_loss(source).logit + float32_loss(folder).logit
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
