"""Training examples of process reward models: solutions with a label for each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prm.records import BadRecord, JsonRecord, read_records

Labels = Literal["hard", "soft"]

_ENGINE_RESULTS = ("settings", "piece", "completion")
"""Keys of the lines of a rollout file that are not examples but recorded engine results."""


@dataclass(frozen=True, slots=True)
class Example:
    """One labelled solution. ``labels`` holds the value of each step, from 0 (cannot lead to a right answer) to 1."""

    question: str
    steps: tuple[str, ...]
    labels: tuple[float, ...]


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
        yield Example(record.text("question"), steps, record.shares(_field(record, labels), len(steps)))


def _field(record: JsonRecord, labels: Labels) -> str:
    if "labels" in record.fields:
        return "labels"
    if labels == "soft" and "hard" in record.fields and "soft" not in record.fields:
        raise BadRecord(f"{record.location}: there are only hard labels (the rollouts ended early); train on hard ones")
    return labels
