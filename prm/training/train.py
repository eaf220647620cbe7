"""Train a process reward model: a token-classification head on any causal base, cross-entropy at step separators only.

Inputs are encoded as by ``prm.scorers.steps``: the question in the chat template, then step, separator, step,
separator, …, each tokenised separately. The target at a separator is the label of the step before it, hard or soft.

A run is determined by its settings and its data: batches and noise depend on the seed and the step number, so an
interrupted run resumes from its last checkpoint and ends with the same weights, bit for bit on the CPU.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.text.tokenizer import Tokenizer
from prm.records import BadRecord
from prm.training.checkpoint import load_checkpoint, save_checkpoint
from prm.training.data import (
    EncodedExample,
    Labels,
    TrainingBatch,
    encode,
    make_batches,
    read_examples,
    select_examples,
    split_examples,
    steps_per_epoch,
)
from prm.training.validation import Validation, validate

SAVE_SECONDS = 120.0
CLIP = 1.0
"""Maximum gradient norm (clipping)."""
WARMUP = 0.05
"""Fraction of the steps with linear learning-rate warm-up, followed by cosine decay to zero."""
POSITIVE = 1
"""Index of the label whose probability is the score."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class TrainPlan:
    base: str
    """Folder of the initial model: a causal language model, or a PRM for further training."""
    data: str
    """File of examples (``prm.training.data``)."""
    out: str
    """Folder of the trained PRM, which must not exist yet; the checkpoint is beside it during training."""
    labels: Labels = "soft"
    separator: str = "\n\n"
    epochs: int = 1
    batch: int = 32
    """Number of solutions in an optimizer step."""
    batch_tokens: int = 8192
    """Maximum number of padded tokens in a forward pass (or one solution), which bounds memory."""
    max_tokens: int = 4096
    """Maximum length of a solution in tokens, also limited by the context; longer ones lose their last steps."""
    rate: float = 1e-5
    weight_decay: float = 0.01
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Trained:
    out: str
    steps: int
    examples: int
    held_out: int
    """Number of validation examples."""
    shortened: int
    """Number of examples that lost steps."""
    seconds: float
    validation: Validation


Progress = Callable[[int, int, str], None]
"""Progress callback with arguments (steps done, steps in all, status text)."""


def train(plan: TrainPlan, progress: Progress, stopped: Callable[[], bool] = lambda: False) -> Trained | None:
    """Train, validate and export. Return ``None`` if stopped; the same call then resumes from the checkpoint.

    Raises ``BadRecord`` for invalid data or settings, ``EngineError`` for an unusable tokenizer.
    """
    out, work = Path(plan.out), Path(f"{plan.out}.work")
    if out.exists():
        raise BadRecord(f"{out} is there already: name another folder for the PRM")
    torch.manual_seed(plan.seed)
    model = _load(plan)
    longest = min(plan.max_tokens, getattr(model.config, "max_position_embeddings", plan.max_tokens))
    tokenizer = Tokenizer(Path(plan.base), model.config.vocab_size)
    learned, held_out, shortened = _read_data(plan, tokenizer, longest)
    settings = _collect_settings(plan)
    decayed = [weight for weight in model.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.rate)
    state = work / "state.safetensors"
    step, seconds = load_checkpoint(state, model, optimizer, settings)
    total = plan.epochs * steps_per_epoch(len(learned), plan.batch)
    saved, running = time.monotonic(), 0.0
    model.train()
    while step < total:
        started = time.monotonic()
        torch.manual_seed(int(hashlib.blake2b(f"{plan.seed}/{step}".encode(), digest_size=7).hexdigest(), 16))
        group = [learned[index] for index in select_examples(step, len(learned), plan.batch, plan.seed)]
        loss = _run_backward(model, group, plan)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for options in optimizer.param_groups:
            options["lr"] = plan.rate * schedule(step, total)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        now = time.monotonic()
        seconds += now - started
        running = loss if running == 0 else 0.95 * running + 0.05 * loss
        progress(step, total, f"loss {running:.4f}")
        ending = stopped()
        if ending or now - saved > SAVE_SECONDS:
            save_checkpoint(state, model, optimizer=optimizer, settings=settings, step=step, seconds=seconds)
            saved = now
        if ending:
            return None
    progress(total, total, "validating")
    validation = _validate(model, held_out, plan)
    _export(model, plan, out, work)
    shutil.rmtree(work, ignore_errors=True)
    return Trained(
        plan.out,
        total,
        examples=len(learned),
        held_out=len(held_out),
        shortened=shortened,
        seconds=seconds,
        validation=validation,
    )


def schedule(step: int, total: int) -> float:
    """Return the learning-rate factor at a step: linear warm-up, then cosine decay."""
    warmup = max(1, round(WARMUP * total))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def _load(plan: TrainPlan) -> Any:
    from transformers import AutoModelForTokenClassification

    if plan.device == "cuda" and not torch.cuda.is_available():
        raise BadRecord("device 'cuda' is requested, but torch finds none here; use 'cpu'")
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


def _read_data(
    plan: TrainPlan, tokenizer: Tokenizer, longest: int
) -> tuple[list[EncodedExample], list[EncodedExample], int]:
    """Return training examples, validation examples, and the number of shortened ones."""
    encoded, shortened = [], 0
    for example in read_examples(Path(plan.data), plan.labels):
        kept = encode(example, tokenizer, plan.separator, longest)
        shortened += len(kept.label_indices) < len(example.steps)
        if kept.label_indices:
            encoded.append(kept)
    learned, held_out = split_examples(encoded)
    return learned, held_out, shortened


def _collect_settings(plan: TrainPlan) -> dict[str, Any]:
    """Return the settings that determine the weights and thus identify the run."""
    with open(plan.data, "rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
    return {name: value for name, value in asdict(plan).items() if name != "out"} | {"data": digest}


def _run_backward(model: Any, group: Sequence[EncodedExample], plan: TrainPlan) -> float:
    """Add the gradient of the mean loss over all separators of the group; return that loss."""
    count = sum(len(example.labels) for example in group)
    loss = 0.0
    for batch in make_batches(group, plan.batch_tokens, plan.device):
        part = _compute_loss(_compute_logits(model, batch), batch) / count
        part.backward()  # type: ignore[no-untyped-call]
        loss += float(part.detach())
    return loss


def _compute_logits(model: Any, batch: TrainingBatch) -> Tensor:
    """Return the head's logits at the separators, of shape (labels, 2)."""
    device = batch.ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
        logits: Tensor = model(input_ids=batch.ids, attention_mask=batch.mask).logits
    return logits.flatten(0, 1)[batch.at].float()


def _compute_loss(logits: Tensor, batch: TrainingBatch) -> Tensor:
    return F.cross_entropy(logits, torch.stack((1 - batch.labels, batch.labels), dim=1), reduction="sum")


@torch.inference_mode()
def _validate(model: Any, examples: Sequence[EncodedExample], plan: TrainPlan) -> Validation:
    model.eval()
    loss = 0.0
    scores: list[float] = []
    labels: list[float] = []
    questions: list[str] = []
    for batch in make_batches(examples, plan.batch_tokens, plan.device):
        logits = _compute_logits(model, batch)
        loss += float(_compute_loss(logits, batch))
        scores += logits.softmax(1)[:, POSITIVE].tolist()
        labels += batch.labels.tolist()
        questions += batch.questions
    return validate(loss / len(labels), scores, labels, questions)


def _export(model: Any, plan: TrainPlan, out: Path, work: Path) -> None:
    """Export a folder for the engine and transformers in the base's precision, atomically by a rename."""
    base = Path(plan.base)
    notes = json.loads((base / "config.json").read_text())
    dtype = getattr(torch, str(notes.get("dtype") or notes.get("torch_dtype") or "float32"))
    model.config.reasoner_prm = {
        "format": "token_classification",
        "separator": plan.separator,
        "positive_label": POSITIVE,
    }
    made = work / "export"
    shutil.rmtree(made, ignore_errors=True)
    model.to(dtype).save_pretrained(made)
    for name in _TOKENIZER_FILES:
        if (base / name).exists():
            shutil.copy(base / name, made / name)
    made.rename(out)
