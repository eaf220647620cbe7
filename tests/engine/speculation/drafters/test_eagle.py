"""EAGLE's drafts equal those of its layer over the whole text, however it was cached, cut or batched."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineError
from engine.scheduler.draft import EMPTY_DRAFT
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.control.controller import FixedController
from engine.speculation.drafters import eagle, tree_draft
from engine.speculation.drafters.eagle import load_eagle
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import SMALL, Harness, generate
from tests.engine.speculation.heads import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    THETA,
    Asked,
    Floats,
    Recorder,
    Target,
    check_drafts,
    eagle_parts,
    ranked,
    rms,
    save_head,
)
from tests.engine.speculation.test_exact import PROMPTS, answers, completions, requests, same
from tests.engine.ties import assert_same_tokens
from tests.long import mostly_long_grid
from tests.rounding import MARGIN
from tests.seeds import shift

SHAPES = {"chain": (4, 4), "tree": (3, 10)}


def guessing(
    folder: Path, head: Path, shape: tuple[int, int], options: EngineOptions = SMALL
) -> tuple[Harness, Recorder]:
    harness = Harness(folder, options)
    recorder = Recorder(load_eagle(head, harness.core.model.decoder))
    harness.core.start_speculation(recorder, FixedController(*shape))
    return harness, recorder


class Reference:
    """The EAGLE layer over a whole text at once, without a cache."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self.target = Target(folder)
        self._weights = {name.removesuffix(".weight"): tensor.double() for name, tensor in tensors.items()}
        self._features: dict[tuple[int, ...], Tensor] = {}

    def logits(self, tokens: Sequence[int], guessed: Sequence[int]) -> Floats:
        """Return the drafter's logits of the token after the draft tokens.

        All tokens but the last have the target's features; from there on the layer's own outputs are used."""
        key = tuple(tokens)
        if key not in self._features:
            self._features = {key: self.target.features(tokens[:-1])}
        features = self._features[key]
        text = [*tokens, *guessed]
        for _ in range(len(guessed) + 1):
            out = self._layer(features, self.target.embedding[text[1 : len(features) + 1]])
            features = torch.cat((features, out[-1:]))
        return self.target.read_direction(features[-1])

    def store(self, vectors: Tensor) -> Tensor:
        """Return keys or values as they are read from the cache."""
        return vectors

    def _layer(self, features: Tensor, embedded: Tensor) -> Tensor:
        w, n = self._weights, len(features)
        centred = features - features.mean(dim=1, keepdim=True)
        hidden = torch.cat((rms(centred) * w["hidden_norm"], embedded), dim=1) @ w["fc"].T
        q, k, v = (
            (hidden @ w[f"layer.self_attn.{name}_proj"].T).view(n, heads, HEAD_DIM).transpose(0, 1)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        angles = torch.arange(n)[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
        turn = torch.polar(torch.ones_like(angles), angles).to(features.dtype.to_complex())

        def turned(x: Tensor) -> Tensor:
            pairs = torch.complex(*x.chunk(2, dim=-1)) * turn
            return torch.cat((pairs.real, pairs.imag), dim=-1)

        k, v = (self.store(each).repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (turned(k), v))
        mixed = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
        gate, up = (hidden @ w[f"layer.mlp.{name}_proj"].T for name in ("gate", "up"))
        inner = (gate * torch.sigmoid(gate) * up) @ w["layer.mlp.down_proj"].T
        return hidden + mixed.transpose(0, 1).reshape(n, -1) @ w["layer.self_attn.o_proj"].T + inner


class RoundedReference(Reference):
    """The same with keys and values, the target's too, that err at random by up to half a step of a quantized type."""

    def __init__(
        self, folder: Path, tensors: dict[str, Tensor], kv_dtype: str, run: int, patch: pytest.MonkeyPatch
    ) -> None:
        super().__init__(folder, tensors)
        self._kv_dtype, self._generator = kv_dtype, torch.Generator().manual_seed(shift(run))
        self._patch, self._update = patch, DynamicCache.update

    def logits(self, tokens: Sequence[int], guessed: Sequence[int]) -> Floats:
        def update(cache: DynamicCache, *states: Any, **named: Any) -> Any:
            return tuple(map(self.store, self._update(cache, *states, **named)))

        self._patch.setattr(DynamicCache, "update", update)
        return super().logits(tokens, guessed)

    def store(self, vectors: Tensor) -> Tensor:
        largest = vectors.abs().amax(dim=-1, keepdim=True)
        # int8 has 127 steps up to a vector's largest number; fp8 has numbers with three bits after the first, of which
        # the smallest are 1 / 448 of the largest over 2^9.
        half_step = (
            largest / 254 if self._kv_dtype == "int8" else torch.maximum(vectors.abs() / 16, largest / 448 / 1024)
        )
        return vectors + half_step * (2 * torch.rand(vectors.shape, generator=self._generator) - 1)


@pytest.fixture(autouse=True)
def _everything_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow all draft tokens, since random weights give each a low probability."""
    monkeypatch.setattr(tree_draft, "FLOOR", 0.0)


def check_guesses(folder: Path, tensors: dict[str, Tensor], made: Sequence[Asked]) -> None:
    check_drafts(Reference(folder, tensors), Reference(folder, tensors), made)


@pytest.mark.parametrize(("shape", "law"), mostly_long_grid(list(SHAPES), ["greedy", "plain"], every=3))
def test_drafts_equal_those_of_the_layer_over_the_whole_text(
    checkpoints: Checkpoints, tmp_path: Path, law: str, shape: str
) -> None:
    """Several branches at once, whose prompts are prefilled in chunks."""
    folder, (config, tensors) = checkpoints("qwen3"), eagle_parts()
    options = replace(SMALL, step_tokens=32, page_size=8)
    harness, recorder = guessing(folder, save_head(tmp_path, config, tensors), SHAPES[shape], options)
    # Nothing is shared, not even a first token that two prompts happen to have: the last entry of a shared prefix is of
    # one of them. Other tests share pages.
    asked = [
        replace(request, branches=request.branches[:1], cache_salt=request.request_id) for request in requests(law)
    ]
    ours, plain = (
        [event.token_ids for events in answers(each, asked) for event in events if isinstance(event, Completion)]
        for each in (harness, Harness(folder, SMALL))
    )
    assert_same_tokens(folder, asked, ours, plain)
    made = [one for one in recorder.asked if one.draft != EMPTY_DRAFT]
    assert len(made) > 0.9 * len(recorder.asked) > 50
    check_guesses(folder, tensors, made[::5])


def test_a_continued_branch_reuses_the_drafters_cached_keys(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, (config, tensors) = checkpoints("qwen3"), eagle_parts()
    harness, recorder = guessing(folder, save_head(tmp_path, config, tensors), (3, 3), replace(SMALL, page_size=8))
    first = harness.complete(generate(PROMPTS[2], [Branch(5, 0, 21)], ignore_eos=True))[0]
    recorder.asked.clear()
    again = harness.complete(generate(PROMPTS[2], [Branch(6, 0, 9, first.token_ids[:12])], ignore_eos=True))[0]
    assert again.cached_tokens == len(PROMPTS[2]) + 11
    made = [one for one in recorder.asked if one.draft != EMPTY_DRAFT]
    assert len(made) >= 5
    check_guesses(folder, tensors, made)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_8_bit_keys_and_values_change_drafts_by_no_more_than_errors_of_half_a_step(
    checkpoints: Checkpoints, tmp_path: Path, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First drafts of continued branches: keys and values of the target and of the layer are read from the cache.

    The peer is the definition, in which each key and value errs at random by up to half a step of the type.
    """
    folder, (config, tensors) = checkpoints("qwen3"), eagle_parts()
    options = replace(SMALL, page_size=8, kv_dtype=kv_dtype)
    harness, recorder = guessing(folder, save_head(tmp_path, config, tensors), (3, 3), options)
    for index, (prompt, count) in enumerate(product(PROMPTS, (12, 20))):
        recorder.asked.clear()
        branch = Branch(5, 0, 9, tuple(range(30, 30 + count)))
        # Nothing is shared: the last entry of a shared prefix depends on the token behind it.
        harness.complete(generate(prompt, [branch], ignore_eos=True, temperature=0.0, cache_salt=f"{index}"))
        asked = next(one for one in recorder.asked if one.draft != EMPTY_DRAFT)
        exact = dict(ranked(Reference(folder, tensors).logits(asked.tokens, ()), asked, len(asked.tokens)))
        chosen = asked.draft.tokens[0]
        with monkeypatch.context() as patch:
            peers = [RoundedReference(folder, tensors, kv_dtype, run, patch) for run in range(8)]
            laws = [dict(ranked(peer.logits(asked.tokens, ()), asked, len(asked.tokens))) for peer in peers]
        bound = MARGIN * max(abs(math.log(law[token] / exact[token])) for law in laws for token in law.keys() & exact)
        assert 0 < abs(math.log(asked.draft.probs[0] / exact[chosen])) <= bound
        assert math.log(max(exact.values()) / exact[chosen]) <= 2 * bound


@pytest.mark.parametrize(("shape", "kv_dtype"), mostly_long_grid(list(SHAPES), ["auto", "int8", "fp8"], every=5))
def test_branches_that_share_pages_are_answered_exactly(
    checkpoints: Checkpoints, tmp_path: Path, shape: str, kv_dtype: str
) -> None:
    """Forks, preemption, and score requests, for whose tokens the drafter has no keys and values."""
    folder, asked = checkpoints("qwen3"), [replace(request, pin_key="a") for request in requests("plain", 40)]
    plain = completions(answers(Harness(folder, replace(SMALL, kv_dtype=kv_dtype)), asked))
    tight = EngineOptions(kv_tokens=160, page_size=8, max_running=6, step_tokens=24, kv_dtype=kv_dtype)
    harness, recorder = guessing(folder, save_head(tmp_path, *eagle_parts()), SHAPES[shape], tight)
    same(asked, completions(answers(harness, asked)), plain, folder, kv_dtype)
    assert harness.core.stats.preemptions > 0
    assert sum(one.draft != EMPTY_DRAFT for one in recorder.asked) > 0.8 * len(recorder.asked)


def test_improbable_and_ending_draft_tokens_are_not_extended(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_draft, "FLOOR", 0.3)
    harness, recorder = guessing(checkpoints("qwen3"), save_head(tmp_path, *eagle_parts()), SHAPES["chain"])
    # A distribution over few tokens, one of which ends the branch.
    law = {"logit_bias": tuple((token, 60.0) for token in (5, 17, 41, 90)), "stop_token_ids": (41,), "min_tokens": 4}
    harness.complete(generate(PROMPTS[1], [Branch(3, key, 30) for key in range(20)], ignore_eos=True, **law))
    drafts = [one.draft for one in recorder.asked if one.wish.depth == 4 and one.draft != EMPTY_DRAFT]
    reasons = Counter[str]()
    for draft in drafts:
        worth = np.cumprod(draft.probs)
        assert (worth[:-1] >= 0.3).all()
        assert 41 not in draft.tokens[:-1]
        reasons["ends"] += draft.tokens[-1] == 41 and len(draft) < 4
        reasons["worth little"] += draft.tokens[-1] != 41 and len(draft) < 4
        assert len(draft) == 4 or draft.tokens[-1] == 41 or worth[-1] < 0.3
    assert min(reasons.values()) >= 5


class _Later(FixedController):
    """Requests drafts once branches have generated 21 tokens."""

    def choose_sizes(self, sequences: Sequence[GenerateSequence], others: int, rested: int, /) -> list[tuple[int, int]]:
        wanted = FixedController.choose_sizes(self, sequences, others, rested)
        return [one if len(s.generated) > 20 else (0, 0) for s, one in zip(sequences, wanted, strict=True)]


@pytest.mark.parametrize("length", [1, 7, 30])
def test_drafts_requested_late_are_the_same(checkpoints: Checkpoints, tmp_path: Path, length: int) -> None:
    """Until then keys and values are computed some at a time, for prompts of one token, of few, and of many."""
    folder, (config, tensors) = checkpoints("qwen3"), eagle_parts()
    harness = Harness(folder, SMALL)
    recorder = Recorder(load_eagle(save_head(tmp_path, config, tensors), harness.core.model.decoder))
    harness.core.start_speculation(recorder, _Later(3, 3))
    harness.complete(generate(PROMPTS[3][:length], [Branch(5, 0, 30)], ignore_eos=True))
    made = [one for one in recorder.asked if one.draft != EMPTY_DRAFT]
    assert len(made[0].tokens) == length + 21
    check_guesses(folder, tensors, made)


def test_drafting_in_parts_gives_the_same_drafts(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = save_head(tmp_path, *eagle_parts())
    drafts = []
    for floats in (eagle._GATHERED_FLOATS, 5000):
        monkeypatch.setattr(eagle, "_GATHERED_FLOATS", floats)
        harness, recorder = guessing(checkpoints("qwen3"), head, SHAPES["tree"])
        answers(harness, requests("plain"))
        drafts.append([(one.draft.tokens, one.draft.parents) for one in recorder.asked])
    assert drafts[0] == drafts[1]


CASES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"hidden_size": 64}, None, "hidden_size is 64, but the target model's is 48"),
    ({"vocab_size": 401}, None, "vocab_size is 401, but the target model's is 400"),
    ({"num_key_value_heads": 3}, None, "num_key_value_heads is 3, but the target model's is 2"),
    ({"head_dim": 32}, None, "head_dim is 32, but the target model's is 16"),
    ({"num_attention_heads": 5}, None, "5 heads cannot share 2 key-value heads"),
    ({"rope_theta": "500"}, None, "rope_theta must be a number above 0, but is '500'"),
    ({"intermediate_size": 65}, None, r"has shape \(64, 48\), its config.json says \(65, 48\)"),
    ({"sliding_window": 5}, None, "sliding_window"),
    ({}, "fc.weight", "lacks the tensor 'fc.weight'"),
    ({}, "fc.bias", "does not use: fc.bias"),
]


@pytest.mark.parametrize(("fields", "tensor", "message"), CASES)
def test_a_head_that_does_not_fit_is_rejected(
    checkpoints: Checkpoints, tmp_path: Path, fields: dict[str, Any], tensor: str | None, message: str
) -> None:
    config, tensors = eagle_parts()
    if tensor is not None:
        tensors = {**tensors, tensor: torch.zeros(48)}
        if tensor == "fc.weight":
            del tensors[tensor]
    model = Harness(checkpoints("qwen3")).core.model.decoder
    with pytest.raises(EngineError, match=message):
        load_eagle(save_head(tmp_path, config | fields, tensors), model)
