"""Solutions with a label for each step: what a process reward model learns from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prm.records import BadRecord, JsonRecord, read_records

Labels = Literal["hard", "soft"]

PAID = ("settings", "piece", "completion")
"""What lines of a rollout file begin with that are no examples: the account of what was asked of the engine."""


@dataclass(frozen=True, slots=True)
class Example:
    """``labels``: the worth of each step, from 0 (cannot become right) to 1."""

    question: str
    steps: tuple[str, ...]
    labels: tuple[float, ...]


def read_examples(path: Path, labels: Labels) -> Iterator[Example]:
    """The examples of a file that ``prm.rollouts.rollouts`` wrote, or of any JSONL with ``question``, ``steps`` (texts)
    and the labels under ``hard``, ``soft`` or ``labels`` (numbers from 0 to 1). Raises ``BadRecord``."""
    for record in read_records(path):
        if any(name in record.fields for name in PAID):
            continue
        if "solution" in record.fields and not record.fields["steps"]:
            continue  # the policy said nothing
        steps = record.texts("steps")
        if not all(step.strip() for step in steps):
            raise record.wrong("steps", "a list of texts of which none is blank")
        yield Example(record.text("question"), steps, record.shares(_field(record, labels), len(steps)))


def _field(record: JsonRecord, labels: Labels) -> str:
    if "labels" in record.fields:
        return "labels"
    if labels == "soft" and "hard" in record.fields and "soft" not in record.fields:
        raise BadRecord(f"{record.place}: there are only hard labels (the rollouts ended early); train on hard ones")
    return labels
