"""Train a process reward model: a token-classification head on any causal base, cross-entropy at step separators only.

Inputs are encoded as by ``prm.scorers.steps``: the question in the chat template, then step, separator, step,
separator, …, each tokenised separately. The target at a separator is the label of the step before it, hard or soft.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.text.tokenizer import Tokenizer
from prm.records import BadRecord
from prm.training.data import (
    EncodedExample,
    Labels,
    TrainingBatch,
    TrainingData,
    encode,
    make_batches,
    read_examples,
    split_examples,
)
from prm.training.loop import Progress, Trained, TrainingPlan, run_training

POSITIVE = 1
"""Index of the label whose probability is the score."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class TrainPlan(TrainingPlan):
    """Settings of a PRM. ``base``: a causal language model, or a PRM for further training."""

    labels: Labels = "soft"
    separator: str = "\n\n"
    weight_decay: float = 0.01


class PrmTrainee:
    """A base with a head, all of whose weights are trained."""

    def __init__(self, model: Any, plan: TrainPlan) -> None:
        self.model = self.trained = model
        self._plan = plan

    def make_batches(self, examples: Sequence[EncodedExample]) -> list[TrainingBatch]:
        return make_batches(examples, self._plan.batch_tokens, self._plan.device)

    def compute_logits(self, batch: TrainingBatch) -> Tensor:
        """Return the head's logits at the separators, ``[labels, 2]``."""
        device = batch.ids.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            logits: Tensor = self.model(input_ids=batch.ids, attention_mask=batch.mask).logits
        return logits.flatten(0, 1)[batch.at].float()

    def compute_loss(self, logits: Tensor, batch: TrainingBatch) -> Tensor:
        return F.cross_entropy(logits, torch.stack((1 - batch.labels, batch.labels), dim=1), reduction="sum")

    def score(self, logits: Tensor) -> list[float]:
        return logits.softmax(1)[:, POSITIVE].tolist()

    def export(self, folder: Path) -> None:
        """Write a folder for the engine and transformers, in the base's precision."""
        base = Path(self._plan.base)
        notes = json.loads((base / "config.json").read_text())
        dtype = getattr(torch, str(notes.get("dtype") or notes.get("torch_dtype") or "float32"))
        self.model.config.reasoner_prm = {
            "format": "token_classification",
            "separator": self._plan.separator,
            "positive_label": POSITIVE,
        }
        self.model.to(dtype).save_pretrained(folder)
        for name in _TOKENIZER_FILES:
            if (base / name).exists():
                shutil.copy(base / name, folder / name)


def train(plan: TrainPlan, progress: Progress, stopped: Callable[[], bool] = lambda: False) -> Trained | None:
    """Train, validate and export a PRM. Return ``None`` if stopped; the same call then resumes from the checkpoint.

    Raises ``BadRecord`` for invalid data or settings, ``EngineError`` for an unusable tokenizer.
    """
    plan.check()
    torch.manual_seed(plan.seed)
    model = _load(plan)
    longest = min(plan.max_tokens, getattr(model.config, "max_position_embeddings", plan.max_tokens))
    data = _read_data(plan, Tokenizer(Path(plan.base), model.config.vocab_size), longest)
    decayed = [weight for weight in model.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.rate)
    return run_training(
        plan, PrmTrainee(model, plan), optimizer=optimizer, data=data, progress=progress, stopped=stopped
    )


def _load(plan: TrainPlan) -> Any:
    from transformers import AutoModelForTokenClassification

    try:
        model = AutoModelForTokenClassification.from_pretrained(
            plan.base,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            id2label={0: "bad", POSITIVE: "good"},
            label2id={"bad": 0, "good": POSITIVE},
        )
    except (OSError, ValueError, KeyError) as error:
        raise BadRecord(f"{plan.base} is no base for a PRM: {error}") from None
    if plan.device != "cpu":
        model.gradient_checkpointing_enable()
    return model.to(plan.device)


def _read_data(plan: TrainPlan, tokenizer: Tokenizer, longest: int) -> TrainingData:
    encoded, shortened = [], 0
    for example in read_examples(Path(plan.data), plan.labels):
        kept = encode(example, tokenizer, plan.separator, longest)
        shortened += len(kept.label_indices) < len(example.steps)
        if kept.label_indices:
            encoded.append(kept)
    return TrainingData(*split_examples(encoded), shortened)
