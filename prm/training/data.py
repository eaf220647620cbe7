"""Training examples of process reward models: solutions with a label for each step, their encoding and their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engine.text.tokenizer import Tokenizer
from prm.records import BadRecord, JsonRecord, read_records

VALIDATION_ONE_IN = 10
"""Reciprocal of the fraction of questions that are held out for validation, at least one."""


Labels = Literal["hard", "soft"]

_ENGINE_RESULTS = ("settings", "piece", "completion")
"""Keys of the lines of a rollout file that are not examples but recorded engine results."""


@dataclass(frozen=True, slots=True)
class Example:
    """One labelled solution. ``labels`` holds the value of each step, from 0 (cannot lead to a right answer) to 1."""

    question: str
    steps: tuple[str, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """Token ids, and the indices of separators with the label at each."""

    question: str
    ids: tuple[int, ...]
    label_indices: tuple[int, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One padded batch. ``ids`` and ``mask``: (rows, length), padded on the right; ``at``: index of each label in the
    flattened ids; ``labels``: (labels,)."""

    ids: Tensor
    mask: Tensor
    at: Tensor
    labels: Tensor
    questions: tuple[str, ...]


class TrainingData(NamedTuple):
    """Examples of one run."""

    learned: list[EncodedExample]
    held_out: list[EncodedExample]
    """Examples for validation, of other questions."""
    shortened: int
    """Number of examples that lost steps, since they were too long."""


def read_examples(path: Path, labels: Labels) -> Iterator[Example]:
    """Yield the examples of a rollout file, or of any JSONL file with the fields ``question``, ``steps`` (texts) and
    ``hard``, ``soft`` or ``labels`` (numbers from 0 to 1). Raises ``BadRecord``."""
    for record in read_records(path):
        if any(name in record.fields for name in _ENGINE_RESULTS):
            continue
        if "solution" in record.fields and not record.fields["steps"]:
            continue  # the policy generated no text
        steps = record.texts("steps")
        if not all(step.strip() for step in steps):
            raise record.wrong("steps", "a list of texts of which none is blank")
        yield Example(record.text("question"), steps, record.shares(_choose_field(record, labels), len(steps)))


def _choose_field(record: JsonRecord, labels: Labels) -> str:
    if "labels" in record.fields:
        return "labels"
    if labels == "soft" and "hard" in record.fields and "soft" not in record.fields:
        raise BadRecord(f"{record.location}: there are only hard labels (the rollouts ended early); train on hard ones")
    return labels


def encode(example: Example, tokenizer: Tokenizer, separator: str, longest: int) -> EncodedExample:
    """Encode an example as ``prm.scorers.steps`` does; steps that do not fit into ``longest`` tokens are left out."""
    ids = list(tokenizer.encode_chat([{"role": "user", "content": example.question}]))
    ending = tokenizer.encode(separator)
    if not ending:
        raise BadRecord(f"the separator {separator!r} has no token in this tokenizer: choose another")
    label_indices, labels = [], []
    for step, label in zip(example.steps, example.labels, strict=True):
        added = (*tokenizer.encode(step.strip()), *ending)
        if len(ids) + len(added) > longest:
            break
        ids += added
        label_indices.append(len(ids) - 1)
        labels.append(label)
    return EncodedExample(example.question, tuple(ids), tuple(label_indices), tuple(labels))


def split_examples(examples: Iterable[EncodedExample]) -> tuple[list[EncodedExample], list[EncodedExample]]:
    """Split the examples into training and validation examples by question, independent of their order.

    Raises ``BadRecord`` for fewer than two questions.
    """
    by_question: dict[str, list[EncodedExample]] = {}
    for example in examples:
        by_question.setdefault(example.question, []).append(example)
    if len(by_question) < 2:
        raise BadRecord("two questions at least are needed, one to learn from and one to validate on")
    ordered = sorted(by_question, key=lambda question: blake2b(question.encode(), digest_size=8).digest())
    kept = set(ordered[: max(1, len(ordered) // VALIDATION_ONE_IN)])
    sides: tuple[list[EncodedExample], list[EncodedExample]] = ([], [])
    for question, group in by_question.items():
        sides[question in kept].extend(group)
    return sides


def select_examples(step: int, count: int, batch: int, seed: int) -> list[int]:
    """Return the indices of the examples of a step. Every epoch is a new permutation of all examples."""
    epoch, index = divmod(step, steps_per_epoch(count, batch))
    order = Random(f"{seed}/{epoch}").sample(range(count), count)
    return order[index * batch : (index + 1) * batch]


def steps_per_epoch(count: int, batch: int) -> int:
    """Return the number of steps of an epoch; the last batch may be smaller."""
    return -(-count // batch)


def make_batches(examples: Sequence[EncodedExample], most: int, device: str) -> list[TrainingBatch]:
    """Group the examples by length into batches of at most ``most`` padded tokens (or one example)."""
    groups: list[list[EncodedExample]] = [[]]
    for example in sorted(examples, key=lambda example: len(example.ids)):
        if groups[-1] and (len(groups[-1]) + 1) * len(example.ids) > most:
            groups.append([])
        groups[-1].append(example)
    return [_collate(group, device) for group in groups if group]


def _collate(examples: Sequence[EncodedExample], device: str) -> TrainingBatch:
    length = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        mask[row, : len(example.ids)] = 1
    at = [row * length + index for row, example in enumerate(examples) for index in example.label_indices]
    labels = [label for example in examples for label in example.labels]
    questions = tuple(example.question for example in examples for _ in example.labels)
    return TrainingBatch(
        ids.to(device),
        mask.to(device),
        at=torch.tensor(at).to(device),
        labels=torch.tensor(labels).to(device),
        questions=questions,
    )
