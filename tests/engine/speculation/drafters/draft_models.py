"""Engines with a draft model, and checks of both caches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from engine.attention.layer import AttentionBackend
from engine.models.interface import Batch, KeepState, Model
from engine.models.load import load_model
from engine.protocol.options import EngineOptions
from engine.protocol.types import Completion, GenerateRequest
from engine.speculation.control.controller import FixedController
from engine.speculation.drafters.draft_model import DraftModel
from tests.engine.helpers import SMALL, Harness
from tests.seeds import shift

CONTEXT = 256
PROMPT = random.Random(shift(0)).choices(range(3, 360), k=70)
LAW = {"temperature": 0.8, "top_k": 40, "ignore_eos": True}
PENALISED = {
    **LAW,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "logit_bias": ((7, 2.0), (9, -3.0)),
    "min_tokens": 20,
    "stop_token_ids": tuple(range(0, 400, 3)),
}
TIGHT = EngineOptions(kv_tokens=320, max_running=8, step_tokens=64)


class Counted:
    """A model with a count of the tokens of each forward pass."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.config, self.device_config = model.config, model.device_config
        self.parameters = model.parameters
        self.passes: list[int] = []

    def forward(self, batch: Batch, attend: AttentionBackend, keep: KeepState | None = None) -> Tensor:
        self.passes.append(len(set(zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True))))
        return self._model.forward(batch, attend, keep)

    def compute_logits(self, hidden: Tensor, token_ids: Sequence[int] = ()) -> Tensor:
        return self._model.compute_logits(hidden, token_ids)


def load(folder: Path) -> Counted:
    return Counted(load_model(folder, lambda _: CONTEXT))


def speculating(
    target: Path, draft: Path, depth: int = 4, nodes: int = 4, options: EngineOptions = SMALL, **limits: int
) -> tuple[Harness, DraftModel]:
    harness = Harness(target, options)
    drafter = DraftModel(load(draft), context=CONTEXT, **limits)
    # For a chain there are as many nodes as levels, also where the end of the branch bounds the depth.
    harness.core.start_speculation(drafter, FixedController(depth, 1 if nodes == depth else nodes))
    return harness, drafter


def counts(harness: Harness) -> tuple[int, int]:
    """Return the number of draft tokens that were verified, and of accepted ones."""
    tally = harness.core.speculation_stats
    assert tally is not None
    return tally.drafted, tally.accepted


def complete(harness: Harness, drafter: DraftModel, asked: Sequence[GenerateRequest]) -> list[list[Completion]]:
    """Complete several requests at once; check both caches at every step.

    The drafter's cache must contain only prefixes of branches."""
    heard = [harness.submit(request) for request in asked]
    while harness.core.has_work:
        harness.core.step()
        harness.core.check_invariants()
        drafter.cache.check()
    assert drafter.cache.num_tables == 0
    answers = [
        sorted((one for one in events if isinstance(one, Completion)), key=lambda one: one.index) for events in heard
    ]
    assert [len(some) for some in answers] == [len(request.branches) for request in asked]
    return answers


def texts(request: GenerateRequest, answers: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [
        (*request.prompt, *branch.generated, *answer.token_ids)
        for branch, answer in zip(request.branches, answers, strict=True)
    ]


def cached(drafter: DraftModel, namespace: str | None = None) -> list[tuple[int, ...]]:
    """Return the longest token sequences in the drafter's radix tree."""
    root = drafter.cache.tree.roots.get(namespace)
    found: list[tuple[int, ...]] = []
    stack = [(root, ())] if root is not None else []
    while stack:
        node, before = stack.pop()
        path = before + node.key
        stack.extend((child, path) for child in node.children.values())
        if not node.children:
            found.append(path)
    return found


def plain(
    folder: Path, asked: Sequence[GenerateRequest], options: EngineOptions = SMALL
) -> list[list[tuple[int, ...]]]:
    harness = Harness(folder, options)
    return [[one.token_ids for one in harness.complete(request)] for request in asked]
