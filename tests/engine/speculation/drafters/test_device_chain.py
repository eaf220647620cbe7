"""On a GPU, a draft model's tokens stay on the device between levels, and the drafts are those of the CPU."""

from __future__ import annotations

import pytest

from engine.models.load import load_model
from engine.protocol.types import Branch
from engine.speculation.control.controller import FixedController
from engine.speculation.drafters.draft_model import DraftModel
from tests.engine.conftest import Checkpoints
from tests.engine.exact import float32_loss
from tests.engine.gpu import EmulatedGraph, emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate
from tests.engine.speculation.drafters.draft_models import CONTEXT, LAW, PROMPT, complete
from tests.engine.speculation.heads import Recorder, assert_same_drafts
from tests.engine.ties import assert_same_tokens
from tests.long import mostly_long_grid


@pytest.mark.parametrize(
    ("shape", "family"), mostly_long_grid([(4, 4), (3, 9)], ["qwen3", "gemma2", "mixtral"], every=5), ids=str
)
def test_drafts_are_those_of_the_cpu(
    checkpoints: Checkpoints, family: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of another family than the target's, with windows and soft caps, and one that cannot be captured."""
    folder = checkpoints("qwen3")
    asked = [
        generate(prompt, [Branch(4, key, 20) for key in range(3)], request_id=str(number), **LAW)
        for number, prompt in enumerate((PROMPT, [*PROMPT[:41], *range(200, 230)], PROMPT[:1]))
    ]
    recorded = []
    for is_gpu in (False, True):
        if is_gpu:
            emulate_gpu(monkeypatch)
        harness = Harness(folder, SMALL)
        config = harness.core.model.decoder.device_config
        drafter = DraftModel(load_model(checkpoints(family), lambda _: CONTEXT, config), context=CONTEXT)
        recorder = Recorder(drafter)
        harness.core.start_speculation(recorder, FixedController(*shape))
        answers = [one.token_ids for some in complete(harness, drafter, asked) for one in some]
        recorded.append((answers, recorder.asked))
    (plain, on_cpu), (ours, on_gpu) = recorded
    assert_same_tokens(folder, asked, ours, plain)
    assert EmulatedGraph.replayed > 10
    assert len(on_cpu) > 20
    # A logit errs, and the sum that its exponential is divided by.
    assert_same_drafts(on_gpu, on_cpu, 2 * float32_loss(checkpoints(family)).logit)
