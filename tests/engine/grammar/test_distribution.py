"""Constrained sampling follows the renormalised distribution; a planted bug shows that the test detects errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

pytest.importorskip("llguidance", reason="the package llguidance is not installed")

from engine.protocol.types import Branch
from engine.sampling.grammar import Grammar
from engine.speculation.control.controller import FixedController
from tests.engine.conftest import Checkpoints, small_tokenizer
from tests.engine.grammar.constraints import CHOICE, EOS, PROMPT, WORDS, Guesses, Law, make_request
from tests.engine.helpers import SMALL, Harness
from tests.seeds import unshifted

pytestmark = unshifted("statistical claims")

SAMPLES = 3000
SURELY, HARDLY = 1e-3, 1e-9


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return small_tokenizer()


def compute_exact_law(folder: Path, tokenizer: PreTrainedTokenizerFast, temperature: float) -> Law:
    """Return the probability of every token sequence of a word and EOS, from transformers' logits in float64.

    At each position the model's distribution is renormalised over the tokens whose bytes go on with a word.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    decode = tokenizer.backend_tokenizer.decoder.decode
    pieces = {token: tokenizer.convert_ids_to_tokens(token) for token in range(3, len(tokenizer))}
    as_bytes = {token: _to_bytes(piece) for token, piece in pieces.items()}
    assert all(as_bytes[token].decode() == decode([piece]) for token, piece in pieces.items() if piece.isascii())
    words = [word.encode() for word in WORDS]
    law: Law = {}
    open_prefixes: dict[tuple[int, ...], tuple[bytes, float]] = {(): (b"", 1.0)}
    while open_prefixes:
        following: dict[tuple[int, ...], tuple[bytes, float]] = {}
        for prefix, (text, probability) in open_prefixes.items():
            with torch.inference_mode():
                logits = model(torch.tensor([PROMPT + prefix])).logits[0, -1].numpy()
            allowed = [t for t, more in as_bytes.items() if any(word.startswith(text + more) for word in words)]
            allowed += [EOS] * (text in words)
            weights = np.exp((logits[allowed] - logits[allowed].max()) / temperature)
            for token, weight in zip(allowed, (weights / weights.sum()).tolist(), strict=True):
                if token == EOS:
                    law[*prefix, token] = probability * weight
                else:
                    following[*prefix, token] = (text + as_bytes[token], probability * weight)
        open_prefixes = following
    assert sum(law.values()) == pytest.approx(1)
    return law


def _to_bytes(piece: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary, by GPT-2's table of printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + index): byte for index, byte in enumerate(sorted(set(range(256)) - set(printable)))}
    return bytes(table[character] for character in piece)


def draw(folder: Path, law: Law, shape: tuple[int, int] | None, temperature: float) -> Counter[tuple[int, ...]]:
    harness = Harness(folder, SMALL)
    if shape is not None:
        harness.core.start_speculation(Guesses(law), FixedController(*shape))
    drawn: Counter[tuple[int, ...]] = Counter()
    for start in range(0, SAMPLES, 500):
        branches = [Branch(seed=3, key=key, max_tokens=20) for key in range(start, start + 500)]
        completions = harness.complete(make_request(CHOICE, branches, temperature=temperature))
        assert all(completion.finish_reason == "stop" for completion in completions)
        drawn.update(completion.token_ids for completion in completions)
    if shape is not None:
        assert harness.core.speculation_stats is not None
        assert harness.core.speculation_stats.accepted > SAMPLES / 10
    return drawn


def p_value(drawn: Counter[tuple[int, ...]], law: Law) -> float:
    if not set(drawn) <= set(law):
        return 0.0
    total = drawn.total()
    common = [sequence for sequence, chance in law.items() if chance * total >= 8]
    observed, expected = [drawn[one] for one in common], [law[one] * total for one in common]
    rest = total - sum(expected)
    if rest > 1e-6:
        observed, expected = [*observed, total - sum(observed)], [*expected, rest]
    assert len(common) > 10
    return float(chisquare(observed, expected).pvalue)


@pytest.mark.parametrize("shape", [None, (3, 3), (3, 9)], ids=["plain", "chain", "tree"])
def test_constrained_sampling_follows_the_renormalised_distribution(
    checkpoints: Checkpoints, tokenizer: PreTrainedTokenizerFast, shape: tuple[int, int] | None
) -> None:
    folder, temperature = checkpoints("qwen3"), 6.0
    law = compute_exact_law(folder, tokenizer, temperature)
    assert p_value(draw(folder, law, shape, temperature), law) > SURELY


@pytest.mark.long  # a test of the test
def test_masks_without_the_draft_prefix_are_detected(
    checkpoints: Checkpoints, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, temperature = checkpoints("qwen3"), 6.0
    law = compute_exact_law(folder, tokenizer, temperature)
    original = Grammar.compute_masks

    def compute_masks(grammar: Grammar, tokens: Sequence[int], parents: Sequence[int]) -> list[Any]:
        return original(grammar, (), ()) * (1 + len(tokens))

    monkeypatch.setattr(Grammar, "compute_masks", compute_masks)
    monkeypatch.setattr(Grammar, "accept", _accept_leniently)
    assert p_value(draw(folder, law, (3, 3), temperature), law) < HARDLY


def _accept_leniently(grammar: Grammar, token: int) -> None:
    grammar._matcher.try_consume_tokens([token])
