"""A failing drafter ends no request, and its state of failed requests is released."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.protocol.types import Completion, EngineError
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation import speculator
from engine.speculation.control.adaptive import AdaptiveController
from engine.speculation.control.controller import FixedController
from engine.speculation.drafter import DraftRequest, StepResult
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness
from tests.engine.speculation.stub_drafters import Oracle
from tests.engine.speculation.test_exact import VOCAB, answers, completions, requests, same, truth


class Fragile(Oracle):
    """Raises at the first call of one of its methods after some steps."""

    where = ""
    steps = 0
    resets = 0

    def reset(self, cache: KVCache) -> None:
        super().reset(cache)
        self.resets += 1

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        self._fail("propose")
        drafts = super().propose(wishes)
        if self.where == "trim" and self.resets == 1:
            drafts[0] = Draft((3,), (-1,), (float("nan"),))
        if self.where == "depth" and self.resets == 1:
            drafts = [self._guess(wish.sequence, wish.nodes, wish.nodes) for wish in wishes]
        return drafts

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        self.steps += 1
        self._fail("advance")
        super().observe_step(steps, hidden)

    def release(self, sequence: GenerateSequence) -> None:
        self._fail("forget")
        super().release(sequence)

    def _fail(self, where: str) -> None:
        if self.where == where and self.steps > 3 and self.resets == 1:
            raise RuntimeError("out of memory")


class Strict(FixedController):
    """Raises if an acceptance probability is NaN."""

    def trim(self, wishes: Sequence[DraftRequest], drafts: Sequence[Draft], /) -> list[Draft]:
        if any(chance != chance for draft in drafts for chance in draft.probs):
            raise ValueError("a chance is not a number")
        return list(drafts)


@pytest.mark.parametrize("where", ["propose", "depth", "trim", "advance", "forget"])
def test_a_failing_drafter_pauses_and_changes_no_result(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(speculator, "_PAUSE", 4)
    folder, asked = checkpoints("qwen3"), requests("plain")
    plain = completions(answers(Harness(folder), asked))
    drafter = Fragile(truth(asked, plain), VOCAB, 0.7)
    drafter.where = where
    harness = Harness(folder)
    harness.core.start_speculation(drafter, Strict(4, 8))
    same(asked, completions(answers(harness, asked)), plain, folder)
    assert [record.message for record in caplog.records] == ["the drafter oracle failed; no drafts for 4 steps"]
    caplog.clear()
    before = harness.core.stats.accepted_tokens
    same(asked, completions(answers(harness, asked)), plain, folder)
    assert harness.core.stats.accepted_tokens > before
    assert not drafter.known


def test_branches_of_a_failed_step_are_released_by_the_drafter(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = checkpoints("qwen3"), requests("plain", length=96)
    plain = completions(answers(Harness(folder), asked))
    oracle = Oracle(truth(asked, plain), VOCAB, 0.7)
    harness = Harness(folder)
    harness.core.start_speculation(oracle, AdaptiveController(4, 8))
    heard = [harness.submit(request) for request in asked]
    while not oracle.wishes:  # plain steps are measured first
        harness.core.step()
        assert harness.core.has_work
    with monkeypatch.context() as patch:
        patch.setattr("engine.core.step.sample_and_score", lambda *_, **__: 1 / 0)
        harness.run()
    for events in heard:
        assert isinstance(events[-1], EngineError)
        assert not any(isinstance(event, Completion) for event in events)
    same(asked, completions(answers(harness, asked)), plain, folder)
    assert not oracle.known
    assert harness.core.timings.requests["generate"] == 2 * len(asked)
