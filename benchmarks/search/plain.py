"""The same search written on plain transformers: a batched ``generate`` for each round, then a full forward pass of the
verifier over the whole solutions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForTokenClassification, GenerationConfig, set_seed

from benchmarks.engine.systems.transformers import load_model, sampling
from benchmarks.search.workload import SEPARATOR_ID, Beam, Seen, Shape, check, prompt, survivors


class _Plain:
    def __init__(self, policy: Any, prm: Any) -> None:
        self._policy = policy
        self._prm = prm

    def scored_search(self, shape: dict[str, int], seed: int) -> dict[str, Any]:
        """Run one search."""
        set_seed(seed)
        start = time.perf_counter()
        seen = self._search(Shape(**shape), seed)
        seen.seconds = time.perf_counter() - start
        return asdict(seen)

    def _search(self, shape: Shape, seed: int) -> Seen:
        seen, beams = Seen(), [Beam(prompt(shape, seed), ())]
        for _ in range(shape.rounds):
            beams = self._grow(beams, shape)
            begun = time.perf_counter()
            scores = self._score(beams, shape, seen)
            seen.scoring += time.perf_counter() - begun
            seen.generated += sum(len(beam.steps[-1]) for beam in beams)
            check(shape, beams, scores)
            beams = survivors(shape, beams, scores)
        return seen

    def _grow(self, beams: Sequence[Beam], shape: Shape) -> list[Beam]:
        each = shape.beams // len(beams)
        config = GenerationConfig(
            **sampling(False), max_new_tokens=shape.tokens, num_return_sequences=each, pad_token_id=0
        )
        ids = torch.tensor([beam.path for beam in beams])
        rows = self._policy.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        new = rows[:, ids.shape[1] :].tolist()
        return [beams[index // each].grown(step) for index, step in enumerate(new)]

    @torch.inference_mode()
    def _score(self, beams: Sequence[Beam], shape: Shape, seen: Seen) -> list[float]:
        """Return the probability of the label ``good`` at each beam's last separator."""
        rows = [
            [*beam.path[: shape.prompt], *(token for step in beam.steps for token in (*step, SEPARATOR_ID))]
            for beam in beams
        ]
        ids = torch.tensor(rows)
        seen.computed += ids.numel()
        logits = self._prm(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        scores: list[float] = logits[:, -1].softmax(1)[:, 1].tolist()
        return scores


def load(folder: Path, threads: int, *, prm: str) -> _Plain:
    """Return both checkpoints in float32 with torch's fused attention."""
    policy = load_model(folder, threads)
    verifier = AutoModelForTokenClassification.from_pretrained(prm, dtype=torch.float32, attn_implementation="sdpa")
    return _Plain(policy, verifier.eval())
