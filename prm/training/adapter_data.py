"""Batches of a verifier adapter's training: branches with the invocation after each of their steps, in one pass.

Each copy of the invocation sees the branch up to its own step and itself, by the attention mask, at the positions that
it will have there. The copies come first, so that the logits behind all rows' copies have the same indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prm.training.data import EncodedExample


@dataclass(frozen=True, slots=True)
class InvocationBatch:
    """Invocations of several branches, then the branches: ``[rows, copies * invocation + branch]``, padded."""

    ids: Tensor
    positions: Tensor
    mask: Tensor
    """``[rows, 1, tokens, tokens]``, 0 where a token sees another one, else the least number."""
    is_invocation: Tensor
    """``[rows, tokens, 1]``: 1 for tokens of an invocation, else 0."""
    reads: Tensor
    """Indices of the last tokens of all copies of the invocation."""
    at: Tensor
    """Indices of the labelled ones among all rows' reads."""
    labels: Tensor
    questions: tuple[str, ...]


def make_batches(
    examples: Sequence[EncodedExample], invocation: Sequence[int], most: int, device: str
) -> list[InvocationBatch]:
    """Group the examples by length into batches of at most ``most`` padded tokens (or one example)."""

    def measure(example: EncodedExample) -> int:
        return len(example.ids) + len(invocation) * len(example.labels)

    groups: list[list[EncodedExample]] = [[]]
    for example in sorted(examples, key=measure):
        if groups[-1] and (len(groups[-1]) + 1) * measure(example) > most:
            groups.append([])
        groups[-1].append(example)
    return [_collate(group, invocation, device) for group in groups if group]


def _collate(examples: Sequence[EncodedExample], invocation: Sequence[int], device: str) -> InvocationBatch:
    size, copies = len(invocation), max(len(example.labels) for example in examples)
    head = size * copies
    width = head + max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    sees = torch.eye(width, dtype=torch.bool).repeat(len(examples), 1, 1)  # a padded token sees itself
    for row, example in enumerate(examples):
        length = len(example.ids)
        ids[row, head : head + length] = torch.tensor(example.ids)
        positions[row, head : head + length] = torch.arange(length)
        sees[row, head : head + length, head : head + length] = torch.ones(length, length).tril().bool()
        for copy, end in enumerate(example.label_indices):
            own = slice(copy * size, (copy + 1) * size)
            ids[row, own] = torch.tensor(invocation)
            positions[row, own] = torch.arange(end, end + size)
            sees[row, own, own] = torch.ones(size, size).tril().bool()
            sees[row, own, head : head + end] = True
    at = [row * copies + copy for row, example in enumerate(examples) for copy in range(len(example.labels))]
    is_invocation = (torch.arange(width) < head).float().expand(len(examples), -1)[..., None]
    labels = [label for example in examples for label in example.labels]
    return InvocationBatch(
        ids.to(device),
        positions.to(device),
        mask=torch.zeros(sees.shape).masked_fill_(~sees, torch.finfo(torch.float32).min)[:, None].to(device),
        is_invocation=is_invocation.to(device),
        reads=torch.arange(size - 1, head, size).to(device),
        at=torch.tensor(at).to(device),
        labels=torch.tensor(labels).to(device),
        questions=tuple(example.question for example in examples for _ in example.labels),
    )
