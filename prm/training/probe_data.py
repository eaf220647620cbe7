"""Training data of a probe: a policy's hidden states at the ends of the steps of its own rollouts, with labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.layer import LayerAttentionConfig
from engine.models.dense_attention import attend_densely
from engine.models.interface import Batch, Model
from engine.quantization.calibration import DenseAttention
from prm.records import BadRecord, JsonRecord, read_records

ProbeLabels = Literal["soft", "hard", "outcome"]
HELD_OUT_ONE_IN = 5
"""Reciprocal of the fraction of questions for validation, and of that for the final test; at least one each."""
_ROLLOUTS_PER_PASS = 16
"""Bounds the memory of a pass over the rollouts of one question."""


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
            if not record.fields.get("prompt"):
                raise BadRecord(
                    f"{record.location}: the prompt's tokens are missing: an older version or a server that only chats "
                    "wrote it, so make the rollouts again"
                )
            if record.fields["steps"]:
                yield _read_rollout(record, [steps[index] for index in sorted(steps)], labels)


def _read_rollout(record: JsonRecord, pieces: list[tuple[str, list[int]]], labels: ProbeLabels) -> LabelledRollout:
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
    """Run the model over the rollouts, and return the states of all layers; ``None`` if stopped."""
    by_question: dict[str, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        by_question.setdefault(rollout.question, []).append(index)
    parts = [
        indices[start : start + _ROLLOUTS_PER_PASS]
        for indices in by_question.values()
        for start in range(0, len(indices), _ROLLOUTS_PER_PASS)
    ]
    collected: dict[int, NDArray[np.float32]] = {}
    for part in parts:
        if stopped():
            return None
        collected |= zip(part, _compute_states(model, [rollouts[index] for index in part]), strict=True)
        on_progress(len(collected))
    labels = np.array([label for rollout in rollouts for label in rollout.labels])
    questions = np.array([rollout.question for rollout in rollouts for _ in rollout.labels])
    states = np.concatenate([collected[index] for index in range(len(rollouts))], axis=1)
    return StepStates(states, labels, questions)


def _compute_states(model: Model, rollouts: list[LabelledRollout]) -> list[NDArray[np.float32]]:
    """Return each rollout's states ``[layers, steps, hidden]``. What all begin with is computed once."""
    # The state before a step's last token predicted it: the one that ``engine.runner.probe`` reads.
    texts = [rollout.tokens[: rollout.ends[-1] - 1] for rollout in rollouts]
    columns = enumerate(zip(*texts, strict=False))
    common = next((index for index, column in columns if len(set(column)) > 1), min(map(len, texts)))
    rests = list(dict.fromkeys(text[common:] for text in texts))
    starts = dict(zip(rests, accumulate((len(rest) for rest in rests), initial=common), strict=False))
    tokens = torch.tensor([*texts[0][:common], *(token for rest in rests for token in rest)])
    positions = torch.tensor([*range(common), *(common + place for rest in rests for place in range(len(rest)))])
    shifts = [starts[text[common:]] - common for text in texts]
    ends = [[end - 2 for end in rollout.ends] for rollout in rollouts]
    rows = [row + shift * (row >= common) for part, shift in zip(ends, shifts, strict=True) for row in part]
    config, at = model.config, torch.tensor(rows)
    states = np.empty((config.num_layers, len(rows), config.hidden_size), np.float32)

    def keep(layer: int, hidden: Tensor) -> None:
        states[layer - 1] = hidden[at].float().numpy() * np.float32(config.hidden_scale)

    attend = _SharedPrefixAttention(config.attention, common, [len(rest) for rest in rests])
    with torch.inference_mode():
        keep(config.num_layers, model.forward(Batch(tokens, positions), attend, keep))
    splits = accumulate((len(part) for part in ends), initial=0)
    return [states[:, start : start + len(part)] for start, part in zip(splits, ends, strict=False)]


class _SharedPrefixAttention(DenseAttention):
    """Attention of several texts that begin alike: the batch has the beginning once, then the rest of each."""

    def __init__(self, layers: Sequence[LayerAttentionConfig], common: int, lengths: Sequence[int]) -> None:
        super().__init__(layers)
        self._lengths = [common, *lengths]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (q, *queries), (k, *keys), (v, *values) = (x.split_with_sizes(self._lengths) for x in (q, k, v))
        texts = [(q, k, v)]
        texts += (
            (query, torch.cat((k, key)), torch.cat((v, value)))
            for query, key, value in zip(queries, keys, values, strict=True)
        )
        return torch.cat([attend_densely(self._layers[layer], *text) for text in texts if len(text[0])])


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
