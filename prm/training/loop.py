"""The training loop of verifiers: optimizer steps, checkpoints, the stop, validation and the export.

A run is determined by its settings and its data: batches and noise depend on the seed and the step number, so an
interrupted run resumes from its last checkpoint and ends with the same weights, bit for bit on the CPU.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from prm.records import BadRecord
from prm.training.checkpoint import load_checkpoint, save_checkpoint
from prm.training.data import EncodedExample, TrainingData, select_examples, steps_per_epoch
from prm.training.validation import Validation, validate

SAVE_SECONDS = 120.0
CLIP = 1.0
"""Maximum gradient norm (clipping)."""
WARMUP = 0.05
"""Fraction of the steps with linear learning-rate warm-up, followed by cosine decay to zero."""

Progress = Callable[[int, int, str], None]
"""Progress callback with arguments (steps done, steps in all, status text)."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Settings that all trained verifiers have."""

    base: str
    """Folder of the initial model."""
    data: str
    """File of examples or rollouts."""
    out: str
    """Folder of the result, which must not exist yet; the checkpoint is beside it during training."""
    epochs: int = 1
    batch: int = 32
    """Number of solutions in an optimizer step."""
    batch_tokens: int = 8192
    """Maximum number of padded tokens in a forward pass (or one solution), which bounds memory."""
    max_tokens: int = 4096
    """Maximum length of a solution in tokens, also limited by the context; longer ones lose their last steps."""
    rate: float = 1e-5
    seed: int = 0
    device: str = "cpu"

    def check(self) -> None:
        """Raise ``BadRecord`` if the result is there already, or the device is not."""
        if Path(self.out).exists():
            raise BadRecord(f"{self.out} is there already: name another folder")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise BadRecord("device 'cuda' is requested, but torch finds none here; use 'cpu'")


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


class Batch(Protocol):
    """A padded batch of examples."""

    @property
    def labels(self) -> Tensor:
        """Labels of all steps, ``[labels]``."""
        ...

    @property
    def questions(self) -> tuple[str, ...]:
        """The question of each label."""
        ...


B = TypeVar("B", bound=Batch)


class Trainee(Protocol[B]):
    """A model in training, and how it reads examples."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def trained(self) -> nn.Module:
        """The parameters that are trained, which checkpoints have."""
        ...

    def make_batches(self, examples: Sequence[EncodedExample]) -> Sequence[B]: ...

    def compute_logits(self, batch: B) -> Tensor:
        """Return the logits at the labels, ``[labels, …]``."""
        ...

    def compute_loss(self, logits: Tensor, batch: B) -> Tensor:
        """Return the sum of the cross-entropies of the labels."""
        ...

    def score(self, logits: Tensor) -> list[float]:
        """Return the probability that a step is right, for each label."""
        ...

    def export(self, folder: Path) -> None:
        """Write the result into a new folder."""
        ...


def run_training(
    plan: TrainingPlan,
    trainee: Trainee[B],
    optimizer: torch.optim.Optimizer,
    data: TrainingData,
    progress: Progress,
    stopped: Callable[[], bool],
) -> Trained | None:
    """Train, validate and export. Return ``None`` if stopped; the same call then resumes from the checkpoint.

    Raises ``BadRecord`` for the checkpoint of a run with other settings or data.
    """
    out, work = Path(plan.out), Path(f"{plan.out}.work")
    settings = _collect_settings(plan)
    state = work / "state.safetensors"
    step, seconds = load_checkpoint(state, trainee.trained, optimizer, settings)
    total = plan.epochs * steps_per_epoch(len(data.learned), plan.batch)
    saved, running = time.monotonic(), 0.0
    trainee.model.train()
    while step < total:
        started = time.monotonic()
        torch.manual_seed(int(hashlib.blake2b(f"{plan.seed}/{step}".encode(), digest_size=7).hexdigest(), 16))
        group = [data.learned[index] for index in select_examples(step, len(data.learned), plan.batch, plan.seed)]
        loss = run_backward(trainee, group)
        _update_parameters(trainee, optimizer, plan.rate * schedule(step, total))
        step += 1
        now = time.monotonic()
        seconds += now - started
        running = loss if running == 0 else 0.95 * running + 0.05 * loss
        progress(step, total, f"loss {running:.4f}")
        ending = stopped()
        if ending or now - saved > SAVE_SECONDS:
            save_checkpoint(state, trainee.trained, optimizer=optimizer, settings=settings, step=step, seconds=seconds)
            saved = now
        if ending:
            return None
    progress(total, total, "validating")
    validation = _validate(trainee, data.held_out)
    _export(trainee, work / "export", out)
    shutil.rmtree(work, ignore_errors=True)
    return Trained(
        plan.out,
        total,
        examples=len(data.learned),
        held_out=len(data.held_out),
        shortened=data.shortened,
        seconds=seconds,
        validation=validation,
    )


def _collect_settings(plan: TrainingPlan) -> dict[str, Any]:
    """Return the settings that determine the weights and thus identify the run."""
    with open(plan.data, "rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
    return {name: value for name, value in asdict(plan).items() if name != "out"} | {"data": digest}


def schedule(step: int, total: int) -> float:
    """Return the learning-rate factor at a step: linear warm-up, then cosine decay."""
    warmup = max(1, round(WARMUP * total))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def run_backward(trainee: Trainee[B], group: Sequence[EncodedExample]) -> float:
    """Add the gradient of the mean loss over all labels of the group; return that loss."""
    count, loss = sum(len(example.labels) for example in group), 0.0
    for batch in trainee.make_batches(group):
        part = trainee.compute_loss(trainee.compute_logits(batch), batch) / count
        part.backward()  # type: ignore[no-untyped-call]
        loss += float(part.detach())
    return loss


def _update_parameters(trainee: Trainee[B], optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Take an optimizer step with the gradients that were added up."""
    nn.utils.clip_grad_norm_(trainee.trained.parameters(), CLIP)
    for options in optimizer.param_groups:
        options["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


@torch.inference_mode()
def _validate(trainee: Trainee[B], examples: Sequence[EncodedExample]) -> Validation:
    trainee.model.eval()
    loss = 0.0
    scores: list[float] = []
    labels: list[float] = []
    questions: list[str] = []
    for batch in trainee.make_batches(examples):
        logits = trainee.compute_logits(batch)
        loss += float(trainee.compute_loss(logits, batch))
        scores += trainee.score(logits)
        labels += batch.labels.tolist()
        questions += batch.questions
    return validate(loss / len(labels), scores, labels, questions)


def _export(trainee: Trainee[B], made: Path, out: Path) -> None:
    """Write the result's folder, atomically by a rename."""
    shutil.rmtree(made, ignore_errors=True)
    trainee.export(made)
    made.rename(out)
