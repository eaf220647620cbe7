"""Training on tiny models: planted labels are learnt, resumed runs end with equal weights, the engine serves it."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification, Qwen3Config, Qwen3ForCausalLM

from engine.core.local_engine import LocalEngine
from engine.text.tokenizer import Tokenizer
from prm.records import BadRecord
from prm.scorers.steps import StepChain, StepScorer
from prm.training.data import EncodedExample, Example, encode, make_batches, select_examples, split_examples
from prm.training.loop import Trained, run_backward, schedule
from prm.training.train import PrmTrainee, TrainPlan, train
from prm.training.validation import auc
from tests.prm.checkpoints import score_gap
from tests.seeds import keep, shift

POLICY = Path(__file__).parents[3] / "reasoner" / "bundled" / "policy"
FACTS = [(a, b) for a in range(2, 8) for b in range(2, 8)]


def quiet(done: int, total: int, following: str) -> None:
    pass


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random model with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("base") / "tiny"
    torch.manual_seed(shift(0))
    config = Qwen3Config(
        vocab_size=826,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=3,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(POLICY / name, folder / name)
    return folder


def write(path: Path, label: Callable[[str, random.Random], float], count: int = 400) -> Path:
    """Write solutions of four steps, each a sum that is right or too large by one."""
    noise = random.Random(keep(4, "a statistical claim"))
    with path.open("w") as file:
        for number in range(count):
            steps = [f"{a} + {b} = {a + b + noise.randrange(2)}" for a, b in noise.choices(FACTS, k=4)]
            line = {"question": f"How many beads does {number % 40} have now?", "steps": steps}
            file.write(json.dumps(line | {"labels": [label(step, noise) for step in steps]}) + "\n")
    return path


def whether_it_begins_with_two(step: str, noise: random.Random) -> float:
    return float(step.startswith("2"))


def in_four_of_five(step: str, noise: random.Random) -> float:
    return float((noise.random() < 0.8) == step.startswith(("2", "3", "4")))


def trained(plan: TrainPlan) -> Trained:
    result = train(plan, quiet)
    assert result is not None
    return result


def plan(base: Path, data: Path, out: Path) -> TrainPlan:
    return TrainPlan(str(base), str(data), str(out), epochs=4, batch=16, rate=3e-3, batch_tokens=1024)


def test_planted_labels_are_learnt_on_unseen_questions(base: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", whether_it_begins_with_two)
    result = trained(plan(base, data, tmp_path / "prm"))
    seen = result.validation
    assert (result.steps, result.examples, result.held_out, seen.steps) == (4 * 23, 360, 40, 160)
    assert seen.auc is not None
    assert seen.within is not None
    assert min(seen.auc, seen.within) > 0.99
    assert seen.loss < 0.05
    assert not (tmp_path / "prm.work").exists()


@pytest.mark.long
def test_scores_are_the_probabilities_from_which_labels_were_sampled(base: Path, tmp_path: Path) -> None:
    """Labels are resampled each time, so the minimal loss is the entropy of the labels."""
    data = write(tmp_path / "data.jsonl", in_four_of_five, 1600)
    seen = trained(replace(plan(base, data, tmp_path / "prm"), epochs=2)).validation
    entropy = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    # With 640 samples the mean loss and the area under the curve have standard deviations of 0.02 each.
    assert seen.loss == pytest.approx(entropy, abs=0.06)
    assert seen.auc == pytest.approx(0.8, abs=0.06)


def test_a_resumed_run_ends_with_bitwise_the_same_weights(base: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", whether_it_begins_with_two, 120)
    one = replace(plan(base, data, tmp_path / "one"), epochs=2)
    two = replace(one, out=str(tmp_path / "two"))
    trained(one)
    steps: list[int] = []
    for stops_after in (3, 1, 5):
        before = len(steps)
        assert (
            train(two, lambda done, *_: steps.append(done), lambda end=before + stops_after: len(steps) >= end) is None
        )  # type: ignore[misc]
        assert (tmp_path / "two.work" / "state.safetensors").exists()
    assert steps == list(range(1, 10))
    trained(two)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_of_another_run_is_refused(base: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", whether_it_begins_with_two, 60)
    begun = plan(base, data, tmp_path / "prm")
    assert train(begun, quiet, lambda: True) is None
    with pytest.raises(BadRecord, match=r"a run with rate 0.003, and 0.1 is requested"):
        train(replace(begun, rate=0.1), quiet)
    write(tmp_path / "data.jsonl", whether_it_begins_with_two, 61)
    with pytest.raises(BadRecord, match="a run with data"):
        train(begun, quiet)


async def test_the_engine_serves_the_export_and_scores_as_transformers_does(base: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", whether_it_begins_with_two)
    out = tmp_path / "prm"
    trained(plan(base, data, out))
    question, steps = "How many beads does 7 have now?", ("2 + 3 = 5", "4 + 4 = 9", "2 + 2 = 4")
    engine = LocalEngine({"prm": out})
    try:
        [info] = await engine.models()
        scorer = StepScorer(engine, info)
        prompt = await scorer.encode_question([{"role": "user", "content": question}])
        [scored] = await scorer.score(prompt, [StepChain(steps)])
    finally:
        await engine.close()
    model = AutoModelForTokenClassification.from_pretrained(out, dtype=torch.float32)
    encoded = encode(Example(question, steps, (0.0,) * 3), Tokenizer(out, 826), "\n\n", 256)
    assert encoded.ids[: len(prompt.tokens)] == prompt.tokens
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([encoded.ids])).logits[0, list(encoded.label_indices)]
    assert scored.scores == pytest.approx(logits.softmax(1)[:, 1].tolist(), abs=score_gap("token_classification", out))
    assert scored.scores[0] > 0.5 > scored.scores[1]


def test_the_bundled_policy_is_a_valid_base_model(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", whether_it_begins_with_two, 120)
    result = trained(replace(plan(POLICY, data, tmp_path / "prm"), epochs=6, rate=2e-3))
    assert result.validation.auc is not None
    assert result.validation.auc > 0.95
    assert json.loads((tmp_path / "prm" / "config.json").read_text())["dtype"] == "float16"


def test_the_loss_is_the_mean_cross_entropy_at_separators_for_any_batching(base: Path, tmp_path: Path) -> None:
    torch.manual_seed(shift(1))
    model = AutoModelForTokenClassification.from_pretrained(base, num_labels=2, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    gap = score_gap("token_classification", tmp_path)
    noise = np.random.default_rng(shift(2))
    group = []
    for length in (9, 30, 17, 12):
        ids = tuple(int(token) for token in noise.integers(10, 800, length))
        group.append(EncodedExample("q", ids, (4, length - 1), (0.25, 1.0)))
    terms = []
    with torch.inference_mode():
        for one in group:
            logs = model(input_ids=torch.tensor([one.ids])).logits[0].double().log_softmax(1)
            terms += [
                -(label * logs[place, 1] + (1 - label) * logs[place, 0])
                for place, label in zip(one.label_indices, one.labels, strict=True)
            ]
    expected = float(torch.stack(terms).mean())
    gradients = []
    for most in (1, 40, 1000):
        model.zero_grad()
        loss = run_backward(PrmTrainee(model, TrainPlan(str(base), "", "", batch_tokens=most)), group)
        assert loss == pytest.approx(expected, abs=2 * gap)
        gradients.append(model.score.weight.grad.clone())
    # Gradients are sums of probability errors times hidden states: both have about a score's relative error.
    for gradient in gradients[:2]:
        assert (gradient - gradients[2]).norm() <= 8 * gap * gradients[2].norm()


def test_steps_that_do_not_fit_are_dropped_whole() -> None:
    tokenizer = Tokenizer(POLICY, 826)
    whole = encode(Example("How many?", ("2 + 2 = 4", "4 + 4 = 8"), (1.0, 0.5)), tokenizer, "\n\n", 256)
    short = encode(Example("How many?", ("2 + 2 = 4", "4 + 4 = 8"), (1.0, 0.5)), tokenizer, "\n\n", len(whole.ids) - 1)
    assert (whole.labels, short.labels) == ((1.0, 0.5), (1.0,))
    assert short.ids == whole.ids[: whole.label_indices[0] + 1]
    assert tokenizer.decode_all([whole.ids[place] for place in whole.label_indices]) == "\n\n\n\n"


def test_every_epoch_reads_every_example_once_in_another_order() -> None:
    epochs = [
        [index for step in range(4) for index in select_examples(4 * epoch + step, 10, 3, seed=5)] for epoch in range(2)
    ]
    assert [sorted(order) for order in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]


def test_a_question_is_on_one_side_of_the_split_in_any_order() -> None:
    examples = [EncodedExample(f"q{i % 30}", (1,), (0,), (1.0,)) for i in range(90)]
    learned, held_out = split_examples(examples)
    assert (len(learned), len(held_out)) == (81, 9)
    assert not {one.question for one in learned} & {one.question for one in held_out}
    assert {one.question for one in split_examples(examples[::-1])[1]} == {one.question for one in held_out}
    with pytest.raises(BadRecord, match="two questions at least"):
        split_examples(examples[:1])


def test_batches_hold_every_example_once_within_their_size_limit() -> None:
    examples = [EncodedExample("q", (1,) * length, (length - 1,), (length / 100,)) for length in (5, 50, 7, 21, 3, 6)]
    made = make_batches(examples, 42, "cpu")
    assert all(batch.ids.numel() <= 42 or len(batch.ids) == 1 for batch in made)
    assert sorted(round(100 * float(label)) for batch in made for label in batch.labels) == [3, 5, 6, 7, 21, 50]
    assert all(batch.mask.flatten()[batch.at].all() for batch in made)


def test_the_learning_rate_warms_up_and_follows_a_cosine() -> None:
    factors = [schedule(step, 100) for step in range(100)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5] == 1.0
    assert schedule(5 + 95 // 2, 100) == pytest.approx(0.5, abs=0.01)
    assert 0 < factors[-1] < 0.001
    assert schedule(0, 1) == 1.0


def test_the_area_under_the_curve_is_the_fraction_of_ordered_pairs() -> None:
    noise = np.random.default_rng(shift(3))
    scores, good = noise.integers(0, 6, 60) / 5, noise.random(60) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[good] for b in scores[~good]]
    assert auc(scores, good) == pytest.approx(np.mean(pairs))
    assert auc(scores[good], good[good]) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cuda"}, "torch finds none here"),
        ({"base": "nowhere"}, "nowhere is no base for a PRM"),
        ({"data": "nowhere"}, "nowhere cannot be read"),
        ({"separator": ""}, "the separator '' has no token"),
    ],
)
def test_invalid_training_inputs_are_refused_with_the_reason(
    base: Path, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    if "device" in change and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    data = write(tmp_path / "data.jsonl", whether_it_begins_with_two, 20)
    with pytest.raises(BadRecord, match=message):
        train(replace(plan(base, data, tmp_path / "prm"), **change), quiet)


def test_an_existing_folder_is_not_overwritten(base: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", whether_it_begins_with_two, 20)
    with pytest.raises(BadRecord, match="is there already"):
        train(plan(base, data, tmp_path), quiet)
