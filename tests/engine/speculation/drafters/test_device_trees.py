"""On a GPU, EAGLE's trees grow on the device and equal the host's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.protocol.types import Completion
from engine.scheduler.sequence import Event
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import EmulatedGraph, emulate_gpu
from tests.engine.helpers import SMALL
from tests.engine.speculation.drafters.test_eagle import SHAPES, guessing
from tests.engine.speculation.heads import eagle_parts, save_head
from tests.engine.speculation.test_exact import answers, requests


def texts(heard: list[list[Event]]) -> list[tuple[int, ...]]:
    return [event.token_ids for events in heard for event in events if isinstance(event, Completion)]


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("law", ["greedy", "plain", "filters"])
def test_the_trees_are_those_that_the_host_grows(
    checkpoints: Checkpoints, tmp_path: Path, law: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (config, tensors) = checkpoints("qwen3"), eagle_parts()
    head, options = save_head(tmp_path, config, tensors), replace(SMALL, step_tokens=32, page_size=8)
    asked = [replace(request, branches=request.branches[:1]) for request in requests(law)]
    harness, on_cpu = guessing(folder, head, SHAPES[shape], options)
    plain = texts(answers(harness, asked))
    emulate_gpu(monkeypatch)
    harness, on_gpu = guessing(folder, head, SHAPES[shape], options)
    assert texts(answers(harness, asked)) == plain
    assert EmulatedGraph.replayed > 20
    assert len(on_gpu.asked) == len(on_cpu.asked) > 20
    for one, other in zip(on_gpu.asked, on_cpu.asked, strict=True):
        assert (one.draft.tokens, one.draft.parents) == (other.draft.tokens, other.draft.parents)
        assert one.draft.probs == pytest.approx(other.draft.probs, rel=1e-3)
