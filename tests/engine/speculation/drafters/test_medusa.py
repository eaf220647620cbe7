"""Medusa's drafts equal the closed form, and heads that do not fit are rejected."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.protocol.types import EngineError
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.speculation.control.controller import FixedController
from engine.speculation.drafters.medusa import load_medusa
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import emulate_gpu
from tests.engine.helpers import SMALL, Harness
from tests.engine.speculation.heads import (
    Asked,
    Guessed,
    Recorder,
    Target,
    assert_same_drafts,
    bound_drafts,
    medusa_parts,
    paths,
    ranked,
    rms,
    save_head,
)
from tests.engine.speculation.test_exact import answers, completions, requests, same
from tests.long import mostly_long_grid
from tests.rounding import compute_rounded

SHAPES = {"chain": (3, 3), "tree": (3, 12), "more than there are heads": (6, 6)}


def guessing(folder: Path, head: Path, shape: tuple[int, int]) -> tuple[Harness, Recorder]:
    harness = Harness(folder, SMALL)
    recorder = Recorder(load_medusa(head, harness.core.model.decoder))
    harness.core.start_speculation(recorder, FixedController(*shape))
    return harness, recorder


def head_logits(target: Target, tensors: dict[str, Tensor], asked: Asked) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return every head's logits ``[heads, vocab]``, from the whole text."""
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    state = rms(target.features(asked.tokens[:-1])[-1])
    both = torch.cat((state, target.embedding[asked.tokens[-1]]))
    gate, up = (tensors[f"trunk.{name}_proj.weight"] @ both for name in ("gate", "up"))
    blocks = tensors["heads.weight"] @ (gate * torch.sigmoid(gate) * up) + tensors["heads.bias"]
    return target.read(state + blocks.view(-1, len(state)))


def ranked_by(target: Target, tensors: dict[str, Tensor], asked: Asked) -> Iterator[list[list[tuple[int, float]]]]:
    """Yield the likeliest draft tokens of every head, with random roundings and without."""

    def compute() -> np.ndarray[Any, np.dtype[np.float64]]:
        return head_logits(target, tensors, asked)

    for logits in (*compute_rounded(compute, runs=1), compute()):
        yield [ranked(row, asked, len(asked.tokens) + place) for place, row in enumerate(logits)]


@pytest.mark.parametrize(("shape", "law"), mostly_long_grid(list(SHAPES), ["greedy", "plain"], every=3))
def test_drafts_equal_the_closed_form(checkpoints: Checkpoints, tmp_path: Path, law: str, shape: str) -> None:
    folder, (config, tensors) = checkpoints("qwen3"), medusa_parts()
    harness, recorder = guessing(folder, save_head(tmp_path, config, tensors), SHAPES[shape])
    asked = requests(law)
    same(asked, completions(answers(harness, asked)), completions(answers(Harness(folder, SMALL), asked)), folder)
    target, guessed = Target(folder), Guessed()
    made = [one for one in recorder.asked if one.draft != EMPTY_DRAFT]
    assert len(made) > 0.9 * len(recorder.asked)
    for one in made[::9]:
        peer, laws = ([dict(law) for law in each] for each in ranked_by(target, tensors, one))
        for _, before, token, chance in paths(one.draft):
            guessed.add(chance, token, peer[len(before)], laws[len(before)])
        if one.wish.nodes == one.wish.depth:
            assert len(one.draft) == min(one.wish.depth, len(laws))
            for token, chances in zip(one.draft.tokens, laws, strict=False):
                guessed.choose(chances[token], max(chances.values()))
    guessed.check()


@pytest.mark.parametrize("shape", list(SHAPES))
def test_drafts_on_a_gpu_are_those_of_the_cpu(
    checkpoints: Checkpoints, tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States stay on the device, and the host copies candidates alone."""
    folder, (config, tensors), made = checkpoints("qwen3"), medusa_parts(), []
    head = save_head(tmp_path, config, tensors)
    for is_gpu in (False, True):
        if is_gpu:
            emulate_gpu(monkeypatch)
        harness, recorder = guessing(folder, head, SHAPES[shape])
        answers(harness, requests("plain"))
        made.append(recorder.asked)
    assert len(made[0]) > 10
    target = Target(folder)
    assert_same_drafts(*made, bound_drafts(lambda one: head_logits(target, tensors, one), made[0]))


def test_a_tree_is_made_of_the_likeliest_combinations(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, (config, tensors) = checkpoints("qwen3"), medusa_parts()
    harness, recorder = guessing(folder, save_head(tmp_path, config, tensors), SHAPES["tree"])
    target, guessed = Target(folder), Guessed()
    answers(harness, requests("plain"))
    made = [one for one in recorder.asked if one.draft != EMPTY_DRAFT and one.wish.depth == 3]
    assert len(made) > 100
    for one in made[::9]:
        peer, worth = (worths(each[: one.wish.depth]) for each in ranked_by(target, tensors, one))
        chosen = {tuple(one.draft.path(index)) for index in range(len(one.draft))}
        assert len(chosen) == 12
        for path in chosen:
            guessed.add(math.prod(said(one.draft, path)), path, peer, worth)
        guessed.choose(min(worth[path] for path in chosen), max(worth[path] for path in worth.keys() - chosen))
    guessed.check()


def worths(laws: Sequence[list[tuple[int, float]]]) -> dict[tuple[int, ...], float]:
    """Return the probability of every combination of the six likeliest tokens."""
    worth = {(): 1.0}
    for place, some in enumerate(laws):
        longest = [path for path in worth if len(path) == place]
        worth |= {(*path, token): worth[path] * chance for path in longest for token, chance in some[:6]}
    del worth[()]
    return worth


def said(draft: Draft, path: tuple[int, ...]) -> list[float]:
    """Return the probabilities of a path's draft tokens."""
    places = [at for at in range(len(draft)) if tuple(draft.path(at)) == path[: draft.depths[at]]]
    return [draft.probs[at] for at in places]


@pytest.mark.parametrize(("name", "value", "target"), [("hidden_size", 64, 48), ("vocab_size", 401, 400)])
def test_heads_of_another_target_are_rejected_with_both_numbers(
    checkpoints: Checkpoints, tmp_path: Path, name: str, value: int, target: int
) -> None:
    config, tensors = medusa_parts()
    model = Harness(checkpoints("qwen3")).core.model.decoder
    with pytest.raises(EngineError, match=f"{name} is {value}, but the target model's is {target}"):
        load_medusa(save_head(tmp_path, config | {name: value}, tensors), model)


def test_broken_heads_are_rejected_by_name(checkpoints: Checkpoints, tmp_path: Path) -> None:
    config, tensors = medusa_parts()
    model = Harness(checkpoints("qwen3")).core.model.decoder
    extra = tensors | {"heads.norm": torch.zeros(3)}
    cases: list[tuple[dict[str, Any], dict[str, Tensor], str]] = [
        (config | {"kind": "eagle"}, tensors, "the kind is 'eagle', not 'medusa'"),
        (config | {"layers": 2}, tensors, "layers"),
        (config | {"heads": 0}, tensors, "heads must be a number above 0, but is 0"),
        (config | {"heads": 4}, tensors, r"has shape \(144, 64\), its config.json says \(192, 64\)"),
        (config, {"other": torch.zeros(3)}, "lacks the tensor 'trunk.gate_proj.weight'"),
        (config, extra, "does not use: heads.norm"),
    ]
    for number, (fields, weights, message) in enumerate(cases):
        with pytest.raises(EngineError, match=message):
            load_medusa(save_head(tmp_path / str(number), fields, weights), model)
