"""The formats of training data by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reasoner.training_data.conversations import build_preference, build_sft, build_unpaired
from reasoner.training_data.labels import By
from reasoner.training_data.recorded_job import RecordedJob
from reasoner.training_data.rollouts import build_rollouts, build_tree
from reasoner.training_data.rows import PreferenceRow, PrmRow, RolloutRow, Row, SftRow, TreeRow, UnpairedRow
from reasoner.training_data.steps import build_prm


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of rows."""

    row: type
    """Its columns, a ``TypedDict``."""
    build: Callable[[RecordedJob, By | None, float], Sequence[Row]]
    """Returns the rows of a job, at least one, with labels of this kind and pairs of this margin, or raises
    ``LeftOut``."""


FORMATS: Mapping[str, Format] = {
    "sft": Format(SftRow, lambda job, _by, _margin: build_sft(job)),
    "preference": Format(PreferenceRow, build_preference),
    "unpaired": Format(UnpairedRow, lambda job, by, _margin: build_unpaired(job, by)),
    "prm": Format(PrmRow, lambda job, by, _margin: build_prm(job, by)),
    "tree": Format(TreeRow, lambda job, _by, _margin: build_tree(job)),
    "rollouts": Format(RolloutRow, lambda job, by, _margin: build_rollouts(job, by)),
}
