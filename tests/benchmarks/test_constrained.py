"""Benchmark of constrained decoding on a tiny model, and the comparison of grammar libraries with ours alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="the package llguidance is not installed")

from typing import Any

from benchmarks.engine.checkpoint import END, Size, checkpoint
from benchmarks.engine.constrained import ConstrainedPlan, document, markdown, measure_constrained
from benchmarks.engine.measure import Listener
from benchmarks.grammar.__main__ import describe, write_table
from benchmarks.grammar.systems import list_schemas, start_ours, try_schema
from engine.text.tokenizer import Tokenizer
from tests.engine.grammar.completion import Vocabulary

TINY = Size(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, intermediate=64)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_steps_with_and_without_masks_take_turns(tmp_path: Path) -> None:
    plan = ConstrainedPlan(model="tiny", batch=4, rounds=2, sizes={"tiny": TINY}, cache=tmp_path)
    totals: list[int] = []
    steps: list[str] = []
    measured = measure_constrained(plan, Listener(total=totals.append, step=steps.append, say=lambda line: None))
    assert totals == [len(steps)]
    runs = measured.runs["batch 4"]
    assert [len(values) for values in runs.values()] == [2] * 6
    assert all(0 < masks < step for masks, step in zip(runs["masks"], runs["constrained"], strict=True))
    rows = {row.metric: row for row in measured.rows}
    assert rows["masks' share of a step"].ours == pytest.approx(
        100 * rows["masks of a step"].ours / rows["decode step"].ours
    )
    told = document(plan, measured)
    assert json.loads(json.dumps(told)) == told
    assert "| grammar | compiling the schema | ms | " in markdown(told, "reasoner bench engine --constrained")


def test_outcomes_of_libraries_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("tiny", TINY, tmp_path)
    tokenizer = Tokenizer(folder, TINY.vocab)
    assert tokenizer.eos == tokenizer.encode(END)[0]
    vocabulary = Vocabulary.from_tokenizer(tokenizer, tokenizer.eos)
    compile_schema = start_ours(folder, TINY.vocab, tokenizer.eos)
    schemas: dict[str, list[Any]] = {
        "random": [{"type": "integer", "maximum": 9}, {"not": {}}, {"enum": ["a", 2]}],
        "published": [{}],
    }
    monkeypatch.setattr("benchmarks.grammar.__main__.list_schemas", lambda: schemas)
    own = [
        try_schema(compile_schema, schema, f"{index}", vocabulary)
        for index, schema in enumerate(schema for group in schemas.values() for schema in group)
    ]
    assert [told["outcome"] for told in own] == ["valid", "refused", "valid", "valid"]
    other = [told | {"outcome": "invalid" if told["outcome"] == "refused" else "refused"} for told in own]
    other = [{"masks": [1.0], "compile": 1.0} | told | {"reason": "no number"} for told in other]
    start = {"import": 0.1, "vocabulary": 0.2}
    document = describe({"ours": own, "xgrammar": other}, {"ours": start, "xgrammar": start}, {"llguidance": "1"})
    assert document["systems"]["ours"]["counts"]["random"]["valid"] == 2
    assert document["systems"]["xgrammar"]["counts"]["random"]["refused, though another answered"] == 2
    assert "| random | ours | 2 | 0 | 0 | 0 | 0 | 1 | 0 |" in write_table(document)
    assert len(list_schemas()["random"]) == 1000
