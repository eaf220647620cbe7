"""This repository's engine, whose branches are held to a JSON Schema or to none, with the time that masks take."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.engine.systems.ours import Ours

# isort: split
import torch

from benchmarks.engine.workloads import VOCAB
from engine.protocol.constraint import Constraint
from engine.protocol.types import Branch, Completion, GenerateRequest, SamplingParams
from engine.sampling import logits_processors
from engine.sampling.grammar import Grammar, GrammarCompiler
from engine.text.tokenizer import Tokenizer

TOKENS, PROMPT = 128, 32
_TEXT = {"type": "string", "maxLength": 40}
_STEP = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["assume", "compute", "conclude"]},
        "explanation": _TEXT,
        "value": {"type": "number"},
        "uses": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 4},
        "sure": {"type": "boolean"},
    },
    "required": ["kind", "explanation", "value", "uses", "sure"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": _TEXT,
        "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "minItems": 100},
        "answer": {"anyOf": [{"type": "number"}, _TEXT]},
    },
    "required": ["title", "steps", "answer"],
    "additionalProperties": False,
    "$defs": {"step": _STEP},
}
"""A solution in steps, as a client would ask for; so many steps that no branch ends while it is timed."""
CONSTRAINT = Constraint("json", json.dumps(SCHEMA))


class Constrained(Ours):
    """The engine, and the seconds spent on masks since they were last asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "auto")
        self.folder = folder
        self.mask_seconds = 0.0

    def constrained_step(self, *, seed: int, batch: int, is_constrained: bool) -> dict[str, float]:
        """Return the mean seconds of a decode step, and of its masks: making, applying, and following the text."""
        prompt = tuple(random.Random(seed).choices(VOCAB, k=PROMPT))
        self.loop.run(self.engine.clear_cache())
        self._seconds(prompt, seed, batch, 1, is_constrained)
        short = self._seconds(prompt, seed, batch, 1, is_constrained)
        self.mask_seconds = 0.0
        with self._timing_masks():
            long = self._seconds(prompt, seed, batch, TOKENS, is_constrained)
        steps = TOKENS - 1
        return {"step": (long - short) / steps, "masks": self.mask_seconds / TOKENS}

    def grammar_times(self, *, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of reading the vocabulary, compiling the schema, and starting a compiled one."""
        vocabulary: int = json.loads((self.folder / "config.json").read_text())["vocab_size"]
        tokenizer = Tokenizer(self.folder, vocabulary)
        assert tokenizer.eos is not None
        times: dict[str, list[float]] = {"vocabulary": [], "compile": [], "start": []}
        for _ in range(rounds):
            compiler = GrammarCompiler(tokenizer.to_json, vocabulary, {tokenizer.eos})
            first = _time_start(compiler, CONSTRAINT)
            compiled = _time_start(compiler, Constraint("json", json.dumps(SCHEMA | {"title": "another"})))
            times["vocabulary"].append(first - compiled)
            times["compile"].append(compiled)
            times["start"].append(_time_start(compiler, CONSTRAINT))
        return times

    def _seconds(self, prompt: tuple[int, ...], seed: int, batch: int, tokens: int, is_constrained: bool) -> float:
        sampling = SamplingParams(temperature=1.0, ignore_eos=not is_constrained)
        branches = tuple(Branch(seed, key, tokens) for key in range(batch))
        constraint = CONSTRAINT if is_constrained else None
        request = GenerateRequest("request", "model", prompt, branches, sampling, constraint=constraint)
        start = time.perf_counter()
        lengths = self.loop.run(self._lengths(request))
        seconds = time.perf_counter() - start
        if lengths != [tokens] * batch:
            raise RuntimeError(f"asked for samples of {tokens} tokens, given were {lengths}")
        return seconds

    async def _lengths(self, request: GenerateRequest) -> list[int]:
        events = [event async for event in self.engine.generate(request)]
        return [len(event.token_ids) for event in events if isinstance(event, Completion)]

    @contextmanager
    def _timing_masks(self) -> Iterator[None]:
        with ExitStack() as patches:
            places: Sequence[tuple[Any, str]] = (
                (Grammar, "compute_masks"),
                (Grammar, "accept"),
                (logits_processors, "restrict"),
            )
            for place, name in places:
                patches.enter_context(patch.object(place, name, self._timed(getattr(place, name))))
            yield

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.mask_seconds += time.perf_counter() - start

        return call


def _time_start(compiler: GrammarCompiler, constraint: Constraint) -> float:
    start = time.perf_counter()
    compiler.start(constraint, (), frozenset())
    return time.perf_counter() - start


def load(folder: Path, threads: int) -> Constrained:
    """Return the engine with the checkpoint loaded."""
    torch.set_num_threads(threads)
    return Constrained(folder)
