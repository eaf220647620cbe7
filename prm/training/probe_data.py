"""Training data of a probe: a policy's hidden states at the ends of the steps of its own rollouts, with labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from engine.models.interface import Batch, Model
from engine.quantization.calibration import DenseAttention
from prm.records import BadRecord, JsonRecord, read_records

ProbeLabels = Literal["soft", "hard", "outcome"]
HELD_OUT_ONE_IN = 5
"""Reciprocal of the fraction of questions for validation, and of that for the final test; at least one each."""


@dataclass(frozen=True, slots=True)
class LabelledRollout:
    """A solution as the policy generated it. ``ends``: number of tokens through each labelled step."""

    question: str
    tokens: tuple[int, ...]
    ends: tuple[int, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepStates:
    """Hidden states ``[layers, steps, hidden]`` that predicted the last token of each step, and the steps' labels."""

    states: NDArray[np.float32]
    labels: NDArray[np.float64]
    questions: NDArray[np.str_]

    def select(self, chosen: NDArray[np.bool_]) -> StepStates:
        return StepStates(self.states[:, chosen], self.labels[chosen], self.questions[chosen])


def read_rollouts(path: Path, labels: ProbeLabels) -> Iterator[LabelledRollout]:
    """Yield the solutions of a file that ``prm.rollouts`` wrote. Raises ``BadRecord``."""
    pieces: dict[tuple[str, int], dict[int, tuple[str, list[int]]]] = {}
    for record in read_records(path):
        if "piece" in record.fields:
            problem, solution, index = record.fields["piece"]
            pieces.setdefault((problem, solution), {})[index] = record.fields["text"], record.fields["ids"]
        elif "solution" in record.fields:
            problem, solution = record.fields["solution"]
            steps = pieces.pop((problem, solution), {})
            if "prompt" not in record.fields:
                raise BadRecord(
                    f"{record.location}: the prompt's tokens are missing: an older version wrote it, so make the "
                    "rollouts again"
                )
            if record.fields["steps"]:
                yield _rollout(record, [steps[index] for index in sorted(steps)], labels)


def _rollout(record: JsonRecord, pieces: list[tuple[str, list[int]]], labels: ProbeLabels) -> LabelledRollout:
    tokens, ends = list(record.fields["prompt"]), []
    for text, ids in pieces:
        tokens += ids
        if text.strip():
            ends.append(len(tokens))
    shares = record.shares("hard", len(ends))
    if labels == "soft":
        if "soft" not in record.fields:
            raise BadRecord(f"{record.location}: there are only hard labels; train on hard ones or on outcomes")
        shares = record.shares("soft", len(ends))
    elif labels == "outcome":
        shares = shares[-1:] * len(ends)
    return LabelledRollout(record.text("question"), tuple(tokens), tuple(ends), shares)


def collect_states(
    model: Model, rollouts: list[LabelledRollout], on_progress: Callable[[int], None], stopped: Callable[[], bool]
) -> StepStates | None:
    """Run the model over each rollout, and return the states of all layers; ``None`` if stopped."""
    config, attend = model.config, DenseAttention(model.config.attention)
    collected: list[NDArray[np.float32]] = []
    for done, rollout in enumerate(rollouts):
        if stopped():
            return None
        # The state before a step's last token predicted it: the one that ``engine.runner.probe`` reads.
        positions = torch.tensor([end - 2 for end in rollout.ends])
        tokens = torch.tensor(rollout.tokens[: rollout.ends[-1] - 1])
        states = np.empty((config.num_layers, len(positions), config.hidden_size), np.float32)

        def keep(
            layer: int, hidden: torch.Tensor, states: NDArray[np.float32] = states, at: torch.Tensor = positions
        ) -> None:
            states[layer - 1] = hidden[at].float().numpy()

        with torch.inference_mode():
            keep(config.num_layers, model.forward(Batch(tokens, torch.arange(len(tokens))), attend, keep))
        collected.append(states)
        on_progress(done + 1)
    labels = np.array([label for rollout in rollouts for label in rollout.labels])
    questions = np.array([rollout.question for rollout in rollouts for _ in rollout.labels])
    return StepStates(np.concatenate(collected, axis=1), labels, questions)


def split_by_question(data: StepStates) -> tuple[StepStates, StepStates, StepStates]:
    """Return the steps to fit on, to choose layers on, and to test on, by question, independent of their order.

    Raises ``BadRecord`` for fewer than three questions.
    """
    ordered = sorted(set(data.questions.tolist()), key=lambda question: blake2b(question.encode()).digest())
    if len(ordered) < 3:
        raise BadRecord(f"there are {len(ordered)} questions; three at least are needed: to fit, to choose and to test")
    count = max(1, len(ordered) // HELD_OUT_ONE_IN)
    parts = ordered[2 * count :], ordered[:count], ordered[count : 2 * count]
    fitted, validation, test = (data.select(np.isin(data.questions, part)) for part in parts)
    return fitted, validation, test
