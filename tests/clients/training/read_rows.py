"""Train for a step on exported rows with TRL, and take rollouts as verl does. Arguments: the files' folder, a model.

Prints one line of JSON: the number of rows that each reader took.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.data_utils import is_conversational
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TRAINERS = {
    "sft": (SFTTrainer, SFTConfig),
    "preference": (DPOTrainer, DPOConfig),
    "unpaired": (KTOTrainer, KTOConfig),
}


def train(folder: Path, path: str) -> dict[str, int]:
    """Return the number of rows that each of TRL's trainers kept, after a step of training on them."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    counts = {}
    for name, (trainer, config) in TRAINERS.items():
        rows = load_dataset("json", data_files=str(folder / f"{name}.jsonl"), split="train")
        assert is_conversational(rows[0])
        with tempfile.TemporaryDirectory() as out:
            options = {"output_dir": out, "max_steps": 1, "per_device_train_batch_size": 2, "report_to": []}
            arguments = config(**options, use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True)
            model = AutoModelForCausalLM.from_pretrained(path)
            trained = trainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer)
            trained.train()
            counts[name] = len(trained.train_dataset)
    return counts


def take_rollouts(rows: list[dict[str, Any]]) -> int:
    """Return the number of rollouts that verl turns into a batch with advantages by groups."""
    names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score")
    outputs = [AgentLoopOutput(**{name: row[name] for name in names}, metrics=AgentLoopMetrics()) for row in rows]
    width = max(len(output.response_ids) for output in outputs)

    def pad(values: list[Any]) -> list[Any]:
        return values + [0] * (width - len(values))

    batch = DataProto.from_dict(
        tensors={
            "responses": torch.tensor([pad(output.response_ids) for output in outputs]),
            "response_mask": torch.tensor([pad(output.response_mask) for output in outputs]),
            "rollout_log_probs": torch.tensor([pad(output.response_logprobs) for output in outputs]),
        },
        non_tensors={"uid": np.array([row["job"] for row in rows], dtype=object)},
    )
    rewards = torch.zeros(len(rows), width)
    for index, output in enumerate(outputs):
        rewards[index, len(output.response_ids) - 1] = output.reward_score or 0.0
    mask, groups = batch.batch["response_mask"], batch.non_tensor_batch["uid"]
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, groups)
    assert advantages.abs().sum() > 0
    assert not advantages[mask == 0].any()
    return len(batch)


def main() -> None:
    folder, path = Path(sys.argv[1]), sys.argv[2]
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    print(json.dumps(train(folder, path) | {"rollouts": take_rollouts(rollouts)}))


if __name__ == "__main__":
    main()
