"""Encoding of examples as token ids, and their order in training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

import torch
from torch import Tensor

from engine.text.tokenizer import Tokenizer
from prm.records import BadRecord
from prm.training.examples import Example

VALIDATION_ONE_IN = 10
"""Reciprocal of the fraction of questions that are held out for validation, at least one."""


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """Token ids, and the indices of separators with the label at each."""

    question: str
    ids: tuple[int, ...]
    places: tuple[int, ...]
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


def encode(example: Example, tokenizer: Tokenizer, separator: str, longest: int) -> EncodedExample:
    """Encode an example as ``prm.scorers.steps`` does; steps that do not fit into ``longest`` tokens are left out."""
    ids = list(tokenizer.encode_chat([{"role": "user", "content": example.question}]))
    ending = tokenizer.encode(separator)
    if not ending:
        raise BadRecord(f"the separator {separator!r} has no token in this tokenizer: choose another")
    places, labels = [], []
    for step, label in zip(example.steps, example.labels, strict=True):
        added = (*tokenizer.encode(step.strip()), *ending)
        if len(ids) + len(added) > longest:
            break
        ids += added
        places.append(len(ids) - 1)
        labels.append(label)
    return EncodedExample(example.question, tuple(ids), tuple(places), tuple(labels))


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
    each = steps_per_epoch(count, batch)
    epoch, place = divmod(step, each)
    order = Random(f"{seed}/{epoch}").sample(range(count), count)
    return order[place * batch : (place + 1) * batch]


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
    at = [row * length + place for row, example in enumerate(examples) for place in example.places]
    labels = [label for example in examples for label in example.labels]
    questions = tuple(example.question for example in examples for _ in example.labels)
    return TrainingBatch(
        ids.to(device), mask.to(device), torch.tensor(at).to(device), torch.tensor(labels).to(device), questions
    )
