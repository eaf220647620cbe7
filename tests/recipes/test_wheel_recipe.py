"""The wheel's training: on the policy's own tokens, in solutions that the verifier believes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from recipes.bundled import SHIPPED, model
from recipes.bundled.data import collate
from recipes.wheel.__main__ import read_examples, train, write_table
from tests.seeds import shift


def make_row(response: list[int], **more: Any) -> dict[str, Any]:
    row = {"prompt_ids": [1, 20, 21], "response_ids": response, "response_mask": [1] * len(response)}
    return row | {"finish_reason": "stop", "reward_score": 0.9} | more


def test_examples_are_believed_solutions_once_each_with_targets_that_the_policy_wrote(tmp_path: Path) -> None:
    rows = [
        make_row([30, 31, 32, 2]),
        make_row([30, 31, 32, 2]),
        make_row([40, 41, 2], response_mask=[1, 0, 1]),
        make_row([50, 2], reward_score=0.4),
        make_row([51, 2], reward_score=None),
        make_row([52, 53], finish_reason="length"),
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    first, second = read_examples(path)
    assert first.ids == [1, 20, 21, 30, 31, 32]
    assert first.targets == [(2, 30), (3, 31), (4, 32), (5, 2)]
    assert second.targets == [(2, 40), (4, 2)]


def test_training_makes_the_examples_likelier(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(shift(5))
    rows = [make_row(torch.randint(30, 600, (12,), generator=generator).tolist()) for _ in range(4)]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    examples = read_examples(path)
    before, _ = model.load(SHIPPED / "policy")
    after = train(examples, epochs=40)
    assert loss_of(after, examples) < 0.9 * loss_of(before, examples)


@torch.inference_mode()
def loss_of(policy: model.Backbone, examples: list[Any]) -> float:
    batch = collate(examples)
    hidden = policy(batch.ids).flatten(0, 1)[batch.target_at]
    return float(torch.nn.functional.cross_entropy(hidden @ policy.embedding.T, batch.targets))


def test_the_table_says_how_far_greedy_is_from_the_old_best_of_16() -> None:
    before = {"greedy": 0.2, "best of 16": 0.5}
    table = write_table({"before": before, "after": {"greedy": 0.56, "best of 16": 0.7}})
    assert table.splitlines()[2] == "| greedy | 0.200 | 0.560 |"
    assert table.endswith("Greedy after is +6.0 points from best of 16 before.")
