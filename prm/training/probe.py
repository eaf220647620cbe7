"""Fit a probe (``engine.runner.probe``): a head on a policy's hidden states, from labelled rollouts of that policy.

For each layer a logistic regression on standardized states is fitted to the labels; its penalty is chosen on validation
questions. The layer with the lowest validation loss is taken, or the best two or three together if that is lower.
Platt scaling on the same questions makes the score a probability. Test questions are used for the report alone.

The computation is seeded and, on one machine and number of threads, deterministic.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.fingerprint import fingerprint
from engine.gguf.folder import weight_files
from engine.models.load import load_model
from engine.protocol.types import EngineError
from engine.runner.probe import Probe
from prm.records import BadRecord
from prm.training.probe_data import (
    LabelledRollout,
    ProbeLabels,
    StepStates,
    collect_states,
    read_rollouts,
    split_by_question,
)
from prm.training.validation import GOOD, Validation, auc, validate

Floats = NDArray[np.float64]

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
"""Candidates for the weight of the squared norm beside the mean cross-entropy."""
MAX_LAYERS = 3
"""Maximum number of layers that one probe reads."""
_LBFGS_STEPS = 60
_ADAM_STEPS = 300
_ADAM_RATE = 3e-3


@dataclass(frozen=True, slots=True)
class ProbePlan:
    base: str
    """Folder of the policy that made the rollouts."""
    data: str
    """File of rollouts (``prm.rollouts.file``)."""
    out: str
    """Folder of the probe, which must not exist yet."""
    labels: ProbeLabels = "soft"
    hidden: int = 0
    """Units of a hidden layer; 0 for a linear head."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LayerResult:
    """AUC of a head on one layer, on validation and on test questions."""

    layer: int
    validation: float | None
    test: float | None


@dataclass(frozen=True, slots=True)
class TrainedProbe:
    out: str
    layers: tuple[int, ...]
    """Layers that the probe reads, from 1."""
    solutions: int
    steps: int
    questions: int
    by_layer: tuple[LayerResult, ...]
    test: Validation
    """Metrics of the calibrated probe on test questions."""
    seconds: float


def train_probe(
    plan: ProbePlan, progress: Callable[[int, int, str], None], stopped: Callable[[], bool] = lambda: False
) -> TrainedProbe | None:
    """Fit, test and write a probe; return ``None`` if stopped. Raises ``BadRecord`` and ``EngineError``."""
    started, base, out = time.monotonic(), Path(plan.base), Path(plan.out)
    if out.exists():
        raise BadRecord(f"{out} is there already: name another folder for the probe")
    rollouts = list(read_rollouts(Path(plan.data), plan.labels))
    if not rollouts:
        raise BadRecord(f"{plan.data} has no finished solutions: run 'reasoner prm rollouts' first")
    model = load_model(base, lambda config: config.max_context)
    if model.config.states:
        raise EngineError(f"{base} has recurrent layers; probes are trained on models whose layers all have attention")
    if any(layer.is_latent for layer in model.config.attention):
        raise EngineError(f"{base} has latent attention; probes are trained on models with keys and values")
    _check_tokens(rollouts, model.config.vocab_size, model.config.max_context, plan)
    total = len(rollouts) + model.config.num_layers
    data = collect_states(model, rollouts, lambda done: progress(done, total, "reading hidden states"), stopped)
    if data is None:
        return None
    fitted, validation, test = split_by_question(data)
    heads: list[_Head] = []
    for layer in range(1, model.config.num_layers + 1):
        heads.append(_fit_best((layer,), fitted, validation, plan))
        progress(len(rollouts) + layer, total, f"layer {layer}")
        if stopped():
            return None
    by_layer = tuple(LayerResult(head.layers[0], head.auc(validation), head.auc(test)) for head in heads)
    heads.sort(key=lambda head: head.loss(validation))
    joined = [
        _fit_best(tuple(sorted(layer for head in heads[:count] for layer in head.layers)), fitted, validation, plan)
        for count in range(2, min(MAX_LAYERS, len(heads)) + 1)
    ]
    best = min([heads[0], *joined], key=lambda head: head.loss(validation)).calibrate(validation)
    probe = best.to_probe(fingerprint(base, weight_files(base)))
    scores = probe.estimate(best.inputs(test))
    result = validate(best.loss(test), scores.tolist(), test.labels.tolist(), test.questions.tolist())
    _write(probe, out, {"labels": plan.labels, "steps": len(data.labels), "test_auc": result.auc})
    questions = len(set(data.questions.tolist()))
    seconds = time.monotonic() - started
    return TrainedProbe(
        plan.out,
        best.layers,
        solutions=len(rollouts),
        steps=len(data.labels),
        questions=questions,
        by_layer=by_layer,
        test=result,
        seconds=seconds,
    )


def _check_tokens(rollouts: Sequence[LabelledRollout], vocab: int, context: int, plan: ProbePlan) -> None:
    """Raise ``BadRecord`` for rollouts that this model cannot have generated."""
    if max(max(rollout.tokens) for rollout in rollouts) >= vocab or max(len(one.tokens) for one in rollouts) > context:
        raise BadRecord(f"{plan.data} was not made by {plan.base}: it has tokens or lengths that this model has not")


@dataclass(frozen=True, slots=True)
class _Head:
    """A fitted head before it is folded into a ``Probe``: standardization, weights and calibration apart."""

    layers: tuple[int, ...]
    mean: Floats
    scale: Floats
    weights: tuple[Floats, ...]
    """Weight and bias; with a hidden layer those of the hidden layer, then those of the output."""
    slope: float = 1.0
    shift: float = 0.0

    def inputs(self, data: StepStates) -> Floats:
        return np.concatenate([data.states[layer - 1] for layer in self.layers], axis=1).astype(np.float64)

    def logits(self, data: StepStates) -> Floats:
        rows = (self.inputs(data) - self.mean) / self.scale
        logits = _forward(torch.from_numpy(rows), [torch.from_numpy(weight) for weight in self.weights])
        return self.slope * logits.numpy() + self.shift

    def loss(self, data: StepStates) -> float:
        """Return the mean cross-entropy in nats."""
        logits = self.logits(data)
        return float(np.mean(np.logaddexp(0, logits) - data.labels * logits))

    def auc(self, data: StepStates) -> float | None:
        return auc(self.logits(data), data.labels >= GOOD)

    def calibrate(self, data: StepStates) -> _Head:
        """Return the head with Platt scaling of its logits (Platt 1999)."""
        logits = torch.from_numpy(self.logits(data))[:, None]
        slope, shift = _minimize(
            [torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)], logits, data, 0.0
        )
        return _Head(
            self.layers, self.mean, scale=self.scale, weights=self.weights, slope=float(slope), shift=float(shift)
        )

    def to_probe(self, mark: str) -> Probe:
        weight, bias, *output = self.weights
        weight, bias = weight / self.scale, bias - (weight / self.scale) @ self.mean
        if not output:
            return Probe(mark, self.layers, self.slope * weight, self.slope * bias + self.shift)
        output_bias = self.slope * float(output[1][0]) + self.shift
        return Probe(
            mark,
            self.layers,
            weight=weight,
            bias=bias,
            output_weight=self.slope * output[0][0],
            output_bias=output_bias,
        )


def _fit_best(layers: tuple[int, ...], fitted: StepStates, validation: StepStates, plan: ProbePlan) -> _Head:
    """Return the head on these layers whose penalty has the lowest validation loss."""
    return min((_fit(layers, fitted, penalty, plan) for penalty in PENALTIES), key=lambda head: head.loss(validation))


def _fit(layers: tuple[int, ...], data: StepStates, penalty: float, plan: ProbePlan) -> _Head:
    rows = np.concatenate([data.states[layer - 1] for layer in layers], axis=1).astype(np.float64)
    mean, scale = rows.mean(axis=0), rows.std(axis=0)
    scale[scale < 1e-6 * np.maximum(1.0, np.abs(mean))] = 1.0  # a constant tells nothing
    inputs, width = torch.from_numpy((rows - mean) / scale), rows.shape[1]
    random = torch.Generator().manual_seed(plan.seed)
    if plan.hidden:
        sizes = ((plan.hidden, width), (plan.hidden,), (1, plan.hidden), (1,))
        weights = [
            torch.randn(size, generator=random, dtype=torch.float64) / size[-1] ** 0.5 * (len(size) - 1)
            for size in sizes
        ]
        weights = _descend(weights, inputs, data, penalty)
    else:
        weights = [torch.zeros(1, width, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
        weights = _minimize(weights, inputs, data, penalty)
    return _Head(layers, mean, scale, tuple(weight.numpy() for weight in weights))


def _forward(inputs: Tensor, weights: Sequence[Tensor]) -> Tensor:
    hidden = F.linear(inputs, weights[0], weights[1])
    if len(weights) > 2:
        hidden = F.linear(hidden.relu(), weights[2], weights[3])
    return hidden[:, 0]


def _compute_objective(weights: Sequence[Tensor], inputs: Tensor, labels: Tensor, penalty: float) -> Tensor:
    loss = F.binary_cross_entropy_with_logits(_forward(inputs, weights), labels)
    return loss + penalty / 2 * sum(weight.square().sum() for weight in weights if weight.ndim > 1)


def _minimize(weights: list[Tensor], inputs: Tensor, data: StepStates, penalty: float) -> list[Tensor]:
    """Return the minimum of a convex objective, found by L-BFGS."""
    labels = torch.from_numpy(data.labels)
    weights = [weight.requires_grad_() for weight in weights]
    optimizer = torch.optim.LBFGS(weights, max_iter=_LBFGS_STEPS, line_search_fn="strong_wolfe")

    def evaluate() -> float:
        optimizer.zero_grad()
        loss = _compute_objective(weights, inputs, labels, penalty)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    optimizer.step(evaluate)  # type: ignore[no-untyped-call]
    return [weight.detach() for weight in weights]


def _descend(weights: list[Tensor], inputs: Tensor, data: StepStates, penalty: float) -> list[Tensor]:
    """Return weights after a fixed number of steps of gradient descent (Adam), for a head that is not convex."""
    labels = torch.from_numpy(data.labels)
    weights = [weight.requires_grad_() for weight in weights]
    optimizer = torch.optim.Adam(weights, lr=_ADAM_RATE)
    for _ in range(_ADAM_STEPS):
        optimizer.zero_grad()
        _compute_objective(weights, inputs, labels, penalty).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [weight.detach() for weight in weights]


def _write(probe: Probe, out: Path, notes: dict[str, object]) -> None:
    """Write the probe's folder as a whole, by a rename."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent) as parent:
        made = Path(parent) / "made"
        made.mkdir()
        probe.save(made, notes)
        shutil.move(made, out)
