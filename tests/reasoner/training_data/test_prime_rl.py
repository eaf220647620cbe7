"""The rollouts as prime-rl's trainer takes them, by the function of the documentation.

Its package is in no registry: ``TrainingSample`` has the fields of ``prime_rl.transports.rollouts.types`` of August
2026 (revision 559b4477), with the rules that its comments and ``prime_rl.trainer.batch`` state.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any, Self

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from reasoner.training_data.recorded_job import RecordedJob
from reasoner.training_data.rollouts import build_rollouts
from tests.docs.blocks import ROOT, blocks
from tests.long import mostly_long
from tests.reasoner.training_data.recorded import TellingEngine, search, tell
from tests.strategies import COMPARING, WRITING

SAMPLES = "prime_rl.transports.rollouts.types"


class TrainingSample(BaseModel):
    """A branch as a flat sequence: the four lists have a value for each token, and what is masked is not trained."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    token_ids: Annotated[list[int], Field(min_length=1)]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        if {len(self.mask), len(self.logprobs), len(self.temperatures)} != {len(self.token_ids)}:
            raise ValueError("the lists differ in length")
        if self.env_name == "all":
            raise ValueError("the name is reserved")
        if any(value > 0 for value in self.logprobs):
            raise ValueError("a log-probability is at most 0")
        return self


def convert(rows: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> list[TrainingSample]:
    """Return the samples that the function of the documentation makes of rows."""
    [code] = [block.code for block in blocks(ROOT / "docs/how-to/training-data.md") if SAMPLES in block.code]
    parts = SAMPLES.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[SAMPLES], "TrainingSample", TrainingSample, raising=False)
    scope: dict[str, Any] = {}
    exec(code, scope)
    return [scope["to_prime_rl"](row) for row in rows]


def count_written(job: RecordedJob) -> int:
    """Return the number of tokens that a model wrote in solutions."""
    nodes = ((job.tokens[name], node) for name, node in job.view.nodes.items())
    return sum(sum(tokens.mask) for tokens, node in nodes if node.is_solution and not tokens.is_copy)


@pytest.mark.parametrize("name", mostly_long(WRITING, every=4))
async def test_each_generated_token_is_trained_in_one_sample_at_its_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more: dict[str, Any] = {} if name in COMPARING else {"verifier": {"kind": "prm"}}
    job = await search(TellingEngine(), strategy={"name": name}, **more)
    rows = build_rollouts(job, None)
    samples = convert(rows, monkeypatch)
    for row, sample in zip(rows, samples, strict=True):
        assert set(sample.temperatures) == {row["temperature"]}
        for at, is_trained in enumerate(sample.mask):
            if is_trained:
                assert sample.logprobs[at] == tell(sample.token_ids[at], at)
    assert sum(sum(sample.mask) for sample in samples) == count_written(job) > 0
