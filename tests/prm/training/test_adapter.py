"""Training a verifier adapter: a planted signal is learnt, and the engine reads what training computed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.adapters.judge import JUDGE_FILE
from engine.protocol.types import ScoreItem
from prm.records import BadRecord
from prm.training.adapter import AdapterPlan, train_adapter
from prm.training.adapter_data import make_batches
from prm.training.data import EncodedExample
from prm.training.loop import Trained
from tests.engine.adapters.lora import create_harness
from tests.engine.conftest import save_checkpoint
from tests.engine.helpers import SMALL, score
from tests.prm.training.test_probe import is_low, write_rollouts

PLAN = AdapterPlan("", "", "", rank=8, epochs=6, batch=16, rate=2e-2, positive="1", negative="2")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_checkpoint("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("data") / "data.jsonl", is_low)


def train(policy: Path, data: Path, out: Path, **settings: object) -> Trained:
    plan = replace(PLAN, base=str(policy), data=str(data), out=str(out), **settings)  # type: ignore[arg-type]
    trained = train_adapter(plan, lambda *_: None)
    assert trained is not None
    return trained


@pytest.mark.parametrize("is_activated", [True, False])
def test_a_planted_signal_is_learnt_and_read_by_the_engine_on_the_branchs_keys(
    policy: Path, data: Path, tmp_path: Path, *, is_activated: bool
) -> None:
    trained = train(policy, data, tmp_path / "judge", is_activated=is_activated)
    assert trained.validation.auc is not None
    assert trained.validation.auc > 0.9
    harness = create_harness(policy, {"judge": tmp_path / "judge"}, SMALL)
    judge = json.loads((tmp_path / "judge" / JUDGE_FILE).read_text())
    assert harness.core.model.adapters["judge"].extra["reasoner_judge"] == judge
    labels = (judge["positive"], judge["negative"])
    right = total = 0
    for question in range(8):
        for kind in (7, 300):  # the token that the label depends on
            branch = (*range(20 + question, 40 + question), kind, 50)
            harness.score(score(ScoreItem((branch,), (0,)), token_ids=labels))
            item = ScoreItem(((*branch, *judge["invocation"]),), (0,))
            [result] = harness.score(score(item, model="judge", token_ids=labels))
            assert result.values is not None
            [(positive, negative)] = result.values
            right += (positive > negative) == (kind == 7)
            total += 1
            assert not is_activated or result.cached_tokens == len(branch)
    assert right / total > 0.8


def test_all_invocations_of_a_branch_in_one_pass_have_the_logits_of_each_alone(policy: Path) -> None:
    """The model of transformers computes each prefix with the invocation by itself, in float64."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64).eval()
    invocation = (7, 9, 8)
    examples = [
        EncodedExample("a", tuple(range(10, 31)), (5, 12, 21), (1.0, 0.0, 1.0)),
        EncodedExample("b", tuple(range(50, 59)), (9,), (0.5,)),
    ]
    [batch] = make_batches(examples, invocation, 10_000, "cpu")
    with torch.no_grad():
        logits = model(
            input_ids=batch.ids,
            attention_mask=batch.mask.double(),
            position_ids=batch.positions,
            logits_to_keep=batch.reads,
            use_cache=False,
        ).logits.flatten(0, 1)[batch.at]
        by_length = sorted(examples, key=lambda example: len(example.ids))
        texts = [(*example.ids[:end], *invocation) for example in by_length for end in example.label_indices]
        alone = torch.stack([model(torch.tensor([text])).logits[0, -1] for text in texts])
    torch.testing.assert_close(logits, alone)


def test_a_stopped_run_resumes_and_ends_with_the_same_bytes(policy: Path, data: Path, tmp_path: Path) -> None:
    train(policy, data, tmp_path / "whole", epochs=1)
    plan = replace(PLAN, base=str(policy), data=str(data), out=str(tmp_path / "parts"), epochs=1)
    num_stops = 0
    while train_adapter(plan, lambda *_: None, stopped=lambda: True) is None:
        num_stops += 1
        assert num_stops < 50
    assert num_stops > 3
    for name in ("adapter_model.safetensors", "adapter_config.json", JUDGE_FILE):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_what_cannot_be_trained_is_refused_with_what_would_be_right(policy: Path, data: Path, tmp_path: Path) -> None:
    for settings, reason in (
        ({"negative": "1"}, "does not tell '1' from '1': choose other labels"),
        ({"invocation": ""}, "the invocation '' has no token in this tokenizer"),
        ({"device": "cuda"}, "device 'cuda' is requested, but torch finds none here"),
    ):
        with pytest.raises(BadRecord, match=reason):
            train(policy, data, tmp_path / "judge", **settings)
    windowed = tmp_path / "windowed"
    windowed.mkdir()
    save_checkpoint("gemma2", windowed)
    with pytest.raises(BadRecord, match="do not attend to all tokens"):
        train(windowed, data, tmp_path / "judge")
