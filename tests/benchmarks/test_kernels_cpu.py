"""Benchmark of quantised decoding on a tiny model, with real processes and engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine.checkpoint import Size
from benchmarks.engine.measure import Listener
from benchmarks.kernels import cpu
from benchmarks.kernels.cpu import CpuPlan, document, markdown, measure_cpu

TINY = Size(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, intermediate=64)

pytestmark = [pytest.mark.timeout(180), pytest.mark.long]


def test_quantised_weights_are_compared_with_float32_at_each_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two systems only: each takes a process, and its quantised weights another.
    monkeypatch.setattr(cpu, "SYSTEMS", {"float32": ("float32", "auto"), "int8, KV int8": ("int8", "int8")})
    plan = CpuPlan(model="tiny", rounds=1, sizes={"tiny": TINY}, cache=tmp_path)
    totals: list[int] = []
    steps: list[str] = []
    measured = measure_cpu(plan, Listener(total=totals.append, step=steps.append, say=lambda line: None))
    assert totals == [len(steps)]
    cases = ["decode int8, KV int8 batch 1", "decode int8, KV int8 batch 16"]
    assert [(row.case, row.peer) for row in measured.rows] == [(case, "float32") for case in cases]
    assert all(row.ratio == pytest.approx(row.ours / row.peer_value) and row.ratio > 0 for row in measured.rows)
    config = json.loads((tmp_path / "tiny-v1-int8-v2" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
    told = document(plan, measured)
    assert json.loads(json.dumps(told)) == told
    assert {"processor", "threads", "versions"} <= set(told["machine"])
    assert "| decode int8, KV int8 batch 16 | " in markdown(told, "reasoner bench kernels")
