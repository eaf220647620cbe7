"""Fitting a probe: planted signals are found, noise is not, and what is written is what the engine computes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.models.load import load_model
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch
from engine.runner.probe import Probe
from prm.records import BadRecord
from prm.training import probe as training
from prm.training.probe import ProbePlan, TrainedProbe, train_probe
from prm.training.probe_data import StepStates, collect_states, read_rollouts
from tests.engine.conftest import save_checkpoint
from tests.engine.helpers import Harness, generate
from tests.engine.probes import exact_scores
from tests.seeds import keep, shift

QUESTIONS, SOLUTIONS = 40, 4
LOW, HIGH = 7, 300
"""The token before the last of each step is one of these."""
Label = Callable[[list[int]], float]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_checkpoint("qwen3", folder)
    return folder


def write_rollouts(path: Path, label: Label, *, questions: int = QUESTIONS) -> Path:
    """Write rollouts of random tokens, two steps each, as ``prm.rollouts`` does; ``label`` is of a step's tokens."""
    rng, lines = random.Random(shift(0)), [json.dumps({"settings": {}})]
    for question in range(questions):
        for solution in range(SOLUTIONS):
            key, prompt = [f"q{question}", solution], rng.choices(range(3, 360), k=5)
            steps = [rng.choices(range(3, 360), k=rng.randint(3, 7)) for _ in range(2)]
            for index, ids in enumerate(steps):
                ids[-2] = rng.choice((LOW, HIGH))
                lines.append(json.dumps({"piece": [*key, index], "text": "x", "ids": ids, "ended": index == 1}))
            soft = [label(ids) for ids in steps]
            example = {"id": key[0], "question": f"question {question}", "prompt": prompt, "steps": ["x", "x"]}
            lines.append(json.dumps({"solution": key} | example | {"hard": [int(x > 0) for x in soft], "soft": soft}))
    path.write_text("\n".join(lines) + "\n")
    return path


def train(policy: Path, data: Path, out: Path, **settings: object) -> TrainedProbe:
    trained = train_probe(ProbePlan(str(policy), str(data), str(out), **settings), lambda *_: None)  # type: ignore[arg-type]
    assert trained is not None
    return trained


def is_low(ids: list[int]) -> float:
    """Return 1 for steps whose token before the last is ``LOW``, which its state knows."""
    return float(ids[-2] == LOW)


@pytest.mark.parametrize("hidden", [0, pytest.param(8, marks=pytest.mark.long)])
def test_a_planted_separable_feature_is_found_with_an_auc_of_1_and_noise_with_about_a_half(
    policy: Path, hidden: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states are drawn at random, and those of the second layer are shifted by the label."""
    rng = np.random.default_rng(keep(0, "a statistical claim"))

    def plant(*arguments: object) -> StepStates:
        data = collect_states(*arguments)  # type: ignore[arg-type]
        assert data is not None
        states: NDArray[np.float32] = rng.normal(size=data.states.shape).astype(np.float32)
        states[1, :, 3] += 20 * data.labels
        return StepStates(states, data.labels, data.questions)

    monkeypatch.setattr(training, "collect_states", plant)
    coin = random.Random(keep(1, "a statistical claim"))
    data = write_rollouts(tmp_path / "data.jsonl", lambda _: float(coin.random() < 0.5), questions=120)
    trained = train(policy, data, tmp_path / "probe", hidden=hidden)
    noise, planted = trained.by_layer
    assert 2 in trained.layers
    assert planted.validation == planted.test == trained.test.auc == 1.0
    assert noise.test == pytest.approx(0.5, abs=0.13)  # four standard deviations for 192 steps


def test_the_position_that_is_read_is_that_of_the_token_before_a_steps_last(policy: Path, tmp_path: Path) -> None:
    """A step's states do not depend on its last token, and agree with transformers' on the tokens before it."""
    data = write_rollouts(tmp_path / "data.jsonl", is_low, questions=3)
    rollouts = list(read_rollouts(data, "soft"))
    model = load_model(policy, lambda _: 256)
    found = collect_states(model, rollouts, lambda _: None, lambda: False)
    assert found is not None
    probe = Probe("", (1, 2), np.eye(1, 96, 5) / 4, np.zeros(1))
    texts = [rollout.tokens[: end - 1] for rollout in rollouts for end in rollout.ends]
    exact, allowed = exact_scores(policy, probe, texts)
    ours = probe.estimate(np.concatenate(list(found.states), axis=1).astype(np.float64))
    assert np.abs(ours - torch.stack([rows[-1] for rows in exact]).numpy()).max() <= allowed


def test_the_engine_scores_as_the_fitted_head_does(policy: Path, tmp_path: Path) -> None:
    trained = train(policy, write_rollouts(tmp_path / "data.jsonl", is_low), tmp_path / "probe")
    assert trained.test.auc is not None
    good, bad = trained.test.good, trained.test.steps - trained.test.good
    # Three standard deviations of the AUC of scores that say nothing (Mann and Whitney).
    assert trained.test.auc > 0.5 + 3 * math.sqrt((good + bad + 1) / (12 * good * bad))
    harness = Harness(policy, EngineOptions(kv_tokens=1024, max_running=4, probe=str(tmp_path / "probe")))
    probe = harness.core.model.probe
    assert probe is not None
    request = generate(range(3, 20), [Branch(0, key, 9) for key in range(4)], ignore_eos=True)
    completions = harness.complete(replace(request, probe=True))
    texts = [(*range(3, 20), *completion.token_ids[:-1]) for completion in completions]
    exact, allowed = exact_scores(policy, probe, texts)
    for completion, rows in zip(completions, exact, strict=True):
        assert completion.probe == pytest.approx(float(rows[-1]), abs=allowed)


@pytest.mark.parametrize("hidden", [0, 4])
def test_the_same_data_and_seed_give_the_same_bytes(
    policy: Path, hidden: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_ADAM_STEPS", 20)  # each is the same or none is
    data = write_rollouts(tmp_path / "data.jsonl", is_low)
    for name in ("first", "second"):
        train(policy, data, tmp_path / name, hidden=hidden, seed=3)
    for file in ("probe.json", "probe.safetensors"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_outcomes_label_every_step_by_the_last_one(tmp_path: Path) -> None:
    data = write_rollouts(tmp_path / "data.jsonl", is_low)
    for soft, outcome in zip(read_rollouts(data, "soft"), read_rollouts(data, "outcome"), strict=True):
        assert outcome.labels == (soft.labels[-1],) * 2


def test_data_that_does_not_fit_is_refused_with_what_would_be_right(policy: Path, tmp_path: Path) -> None:
    few = write_rollouts(tmp_path / "few.jsonl", is_low, questions=2)
    with pytest.raises(BadRecord, match="there are 2 questions; three at least are needed"):
        train(policy, few, tmp_path / "probe")
    old = tmp_path / "old.jsonl"
    old.write_text(few.read_text().replace('"prompt"', '"other"'))
    with pytest.raises(BadRecord, match="the prompt's tokens are missing"):
        train(policy, old, tmp_path / "probe")
    other = tmp_path / "other.jsonl"
    other.write_text(few.read_text().replace('"ids": [', '"ids": [5000, '))
    with pytest.raises(BadRecord, match="was not made by"):
        train(policy, other, tmp_path / "probe")
    (tmp_path / "taken").mkdir()
    with pytest.raises(BadRecord, match="is there already"):
        train(policy, few, tmp_path / "taken")
