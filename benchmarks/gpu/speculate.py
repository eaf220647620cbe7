"""Time decoding with an EAGLE-3 head beside plain decoding, at a given acceptance: costs are real, acceptance is not.

``python -m benchmarks.gpu.speculate --out FILE BATCH ...`` on a GPU; with ``--tiny`` anywhere, as a test of itself.
Model and head have the shapes of Llama 3.1 8B and of its published head, and random weights, with which no draft token
would be accepted. So each draft token is accepted with a probability given here, whatever was sampled, until one is
refused: the engine drafts, verifies, samples and keeps as many tokens as with a trained head of that acceptance. The
table says from how many tokens a round drafting pays, which depends on costs alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import decode
from benchmarks.kernels import step as shapes
from benchmarks.kernels.dry_run import TINY_MODEL
from engine.core.engine_core import EngineCore
from engine.scheduler.draft import Draft
from engine.speculation.control.adaptive import AdaptiveController
from engine.speculation.control.controller import Controller, FixedController
from engine.speculation.load import MAX_NODES
from engine.speculation.speculator import Speculator

BATCHES, TINY_BATCHES = (1, 8, 32, 64, 256), (1, 2)
CONTEXT, TINY_CONTEXT = 1024, 48
DEPTH = 5
"""Draft tokens of a round, in a chain."""
ACCEPTANCE = {
    "2 tokens a round": 2.0,
    "3 tokens a round": 3.0,
    "4.68 tokens, as published": 4.68,
}
"""Mean numbers of tokens of a round, the sampled one included, by their names in the table. The last one is that of
5 draft tokens for Llama 3.1 8B on MT-bench: https://github.com/sgl-project/sglang/pull/4247."""
DRAFT_VOCAB, TINY_VOCAB = 32_000, 128
GOALS = {1: 355, 8: 2_148, 32: 7_317}
"""Tokens per second of other engines with 8B models on an H100, at their own prompts and acceptances."""
_TOLERANCE = 0.97
"""Share of plain decoding's speed that still counts as not below it: such timings differ by some percent."""
_PLAIN_STEPS, _ROUNDS, _ADAPTIVE_ROUNDS = 60, 40, 160
_TINY_ROUNDS = 3
_NEW_TOKENS = 1000
Accept = Callable[[Draft, Sequence[int]], tuple[int, ...]]


@dataclass(frozen=True)
class Rate:
    """What was measured of some steps."""

    tokens: float
    """Tokens per second of all branches together."""
    round_ms: float
    drafting_ms: float
    per_round: float
    """Tokens of a branch and step."""


class RandomHead(shapes.RandomWeights):
    """Random tensors of an EAGLE-3 head, whose drafts are certain: so a chain grows to its full depth."""

    def __init__(self, _: Path) -> None:
        super().__init__(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def take_floats(self, name: str, *shape: int) -> Tensor:
        """Return a random tensor; logits are spread so far that the first candidate has nearly all probability."""
        return super().take_floats(name, *shape).mul_(100 if name.startswith("lm_head") else 1)

    def has(self, name: str) -> bool:
        """Return True for the names of SafeAILab's format, and for no table of its own."""
        return name.startswith("midlayer.")

    def expect(self, name: str, *shape: int) -> None:
        """Do nothing: every tensor has the shape that it is asked for."""

    def take_raw(self, *_: object, **__: object) -> Tensor:
        """Return the offsets of draft tokens from the target's: the first tokens of the vocabulary."""
        return torch.zeros(self.draft_vocab, dtype=torch.int64)

    draft_vocab = DRAFT_VOCAB


def main(argv: Sequence[str] | None = None) -> int:
    """Time all numbers of branches and write the table after each; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.speculate", description=__doc__)
    parser.add_argument("batches", nargs="*", type=int, metavar="BATCH", help="numbers of branches")
    parser.add_argument("--out", type=Path, required=True, help="file of the table")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on whatever device there is")
    arguments = parser.parse_args(argv)
    tiny = arguments.tiny
    sizes: decode.Sizes = {**TINY_MODEL, "num_hidden_layers": 6} if tiny else decode.SIZES
    lines = [f"{describe_gpu()}. {DEPTH} draft tokens a round in a chain; prompts of {CONTEXT} tokens.", "", *HEADER]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        decode.write_checkpoint(folder, sizes)
        write_head(folder / "head", sizes, TINY_VOCAB if tiny else DRAFT_VOCAB)
        stack.enter_context(decode.random_weights(shapes.read_whole))
        stack.enter_context(patch("engine.speculation.drafters.eagle3.head.Weights", RandomHead))
        stack.enter_context(patch.object(RandomHead, "draft_vocab", TINY_VOCAB if tiny else DRAFT_VOCAB))
        if not torch.cuda.is_available():
            stack.enter_context(decode.emulated_gpu())
        for batch in arguments.batches or (TINY_BATCHES if tiny else BATCHES):
            lines += time_batch(folder, decode.Work(batch, TINY_CONTEXT if tiny else CONTEXT), tiny=tiny)
            arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
            decode.free_memory()
    print("\n".join(lines))
    return 0


HEADER = (
    "| batch | acceptance | plain, tokens/s | drafts, tokens/s | adaptive, tokens/s | round | of it drafting "
    "| pays from, tokens a round | never below plain | goal |",
    "|---:|---|---:|---:|---:|---:|---:|---:|---|---:|",
)


def time_batch(folder: Path, work: decode.Work, *, tiny: bool) -> list[str]:
    """Return a row of the table for each acceptance."""
    core = decode.create_core(
        folder, [work], "auto", tiny=tiny, draft=f"eagle3={folder / 'head'}", new_tokens=_NEW_TOKENS
    )
    speculator = core.runner.speculator
    assert speculator is not None
    core.runner.speculator = None
    plain = time_rounds(core, work, _TINY_ROUNDS if tiny else _PLAIN_STEPS, None)
    core.runner.speculator = speculator
    rows = []
    for name, length in ACCEPTANCE.items():
        with accepted_with(find_probability(length, DEPTH)):
            fixed = time_rounds(core, work, _TINY_ROUNDS if tiny else _ROUNDS, FixedController(DEPTH, DEPTH))
            controller = AdaptiveController(decode.DRAFT_LENGTH, MAX_NODES)
            adaptive = time_rounds(core, work, _TINY_ROUNDS if tiny else _ADAPTIVE_ROUNDS, controller)
        is_below = adaptive.tokens < _TOLERANCE * plain.tokens
        rows.append(
            f"| {work.batch} | {name} | {plain.tokens:,.0f} | {fixed.tokens:,.0f} at {fixed.per_round:.2f} "
            f"| {adaptive.tokens:,.0f} | {fixed.round_ms:.2f} ms | {fixed.drafting_ms:.2f} ms "
            f"| {fixed.round_ms / plain.round_ms:.2f} | {'NO' if is_below else 'yes'} "
            f"| {GOALS.get(work.batch, '')} |"
        )
        print(rows[-1], flush=True)
    return rows


def time_rounds(core: EngineCore, work: decode.Work, rounds: int, controller: Controller | None) -> Rate:
    """Decode from the prompts on, whose keys are cached after the first time; the first third of rounds warms up.

    ``controller``: of the drafts; ``None`` for plain decoding. An adaptive one is measured from its start, as its
    trials are part of what it costs.
    """
    speculator = core.runner.speculator
    if speculator is not None and controller is not None:
        restart(speculator, controller)
    decode.fill(core, work, new_tokens=_NEW_TOKENS)
    if not isinstance(controller, AdaptiveController):
        for _ in range(max(1, rounds // 3)):
            core.step()
    decode.synchronize()
    generated, drafting = core.runner.num_generated, 0.0 if speculator is None else speculator.stats.seconds
    start = time.perf_counter()
    for _ in range(rounds):
        core.step()
    decode.synchronize()
    seconds = time.perf_counter() - start
    tokens = core.runner.num_generated - generated
    spent = 0.0 if speculator is None else speculator.stats.seconds - drafting
    core.cancel(lambda _: True)
    return Rate(tokens / seconds, 1e3 * seconds / rounds, 1e3 * spent / rounds, tokens / rounds / work.batch)


def restart(speculator: Speculator, controller: Controller) -> None:
    """Let a speculator begin with another controller, over the cache that it has."""
    speculator.controller = controller
    speculator._skipped.num_left = speculator._skipped.num_skipped = 0


def write_head(folder: Path, sizes: decode.Sizes, vocab: int) -> None:
    """Write the config of a head of one layer in the model's shapes, in SafeAILab's format."""
    folder.mkdir()
    names = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"
    fields = {name: sizes[name] for name in names} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "max_position_embeddings": 65536,
        "eagle_aux_hidden_state_layer_ids": [2, sizes["num_hidden_layers"] // 2, sizes["num_hidden_layers"] - 2],
    }
    (folder / "config.json").write_text(json.dumps(fields))


def find_probability(length: float, depth: int) -> float:
    """Return the probability of each draft token that gives rounds of ``length`` tokens in the mean: the sum of its
    powers up to ``depth``, the zeroth, which is the sampled token, included."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        is_less = sum(middle**power for power in range(depth + 1)) < length
        low, high = (middle, high) if is_less else (low, middle)
    return high


@contextmanager
def accepted_with(probability: float) -> Iterator[Accept]:
    """Make engines accept each draft token with a probability, if the one before it is; of siblings the first.

    Yields what takes the place of ``find_accepted``."""
    dice = np.random.default_rng(0)

    def accept(draft: Draft, _: Sequence[int]) -> tuple[int, ...]:
        path: list[int] = []
        last = -1
        for index, parent in enumerate(draft.parents):
            if parent == last:
                if dice.random() >= probability:
                    break
                path.append(index)
                last = index
        return tuple(path)

    with patch("engine.core.step.find_accepted", accept):
        yield accept


def describe_gpu() -> str:
    """Return the name of the GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


if __name__ == "__main__":
    sys.exit(main())
