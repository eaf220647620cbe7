"""This repository's engine with a drafter, in-process, with a user's default options."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from engine.attention.layer import HeadShape
from engine.protocol.request_checks import require_ids
from engine.protocol.types import TokenizeRequest
from engine.threads import short_waits  # noqa: F401 - it has to come before torch

# isort: split
import torch
from torch import Tensor

from benchmarks.engine.problems import ALWAYS, PLAIN, SHORT, SPECULATIVE, Prompt, Solved
from engine.cache.paged_kv import KVCache
from engine.core.engine_core import EngineCore
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, GenerateRequest, SamplingParams
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.control.adaptive import AdaptiveController
from engine.speculation.control.controller import Controller, FixedController
from engine.speculation.drafter import Drafter, DraftRequest, HiddenStateNeeds, StepResult
from engine.speculation.drafters.ngram import NgramDrafter
from engine.speculation.load import MAX_NODES
from engine.speculation.speculator import Speculator
from kernels.ngrams import NgramTable

_BEAMS, _SURVIVORS, _ROUNDS = 8, 4, 8


class _SpeculativeEngine:
    """Plain and speculative runs on one engine, since two processes of the same code differ by more than the measured
    effect.
    """

    def __init__(self, folder: Path, draft: str, always: int, kv_tokens: int | None) -> None:
        self._loop = asyncio.Runner()
        self._engine = LocalEngine({"model": folder}, EngineOptions(draft=draft, kv_tokens=kv_tokens))
        shipped = self._core.runner.speculator
        self._ways: dict[str, Speculator | None] = {PLAIN: None, SPECULATIVE: shipped}
        """Speculator of each way."""
        if always and shipped is not None:
            self._ways[ALWAYS] = self._speculator(shipped.drafter, FixedController(always, always))
        if draft == "ngram":
            short = NgramDrafter(NgramTable(lengths=(1, 2, 3, 4), noise=0.0))
            self._ways[SHORT] = self._speculator(short, AdaptiveController(8, MAX_NODES))
        self._simulated: dict[float, Speculator] = {}
        self._runs = 0

    def tokenize(self, problem: str) -> list[int]:
        messages = [{"role": "user", "content": problem}]
        return list(self._loop.run(self._engine.tokenize(TokenizeRequest("model", messages))))

    def solve(self, prompts: Sequence[Prompt], batch: int, seed: int, way: str = SPECULATIVE) -> Solved:
        async def work() -> list[list[int]]:
            places = asyncio.Semaphore(batch)

            async def one(key: int, prompt: Prompt) -> list[int]:
                async with places:
                    branch = Branch(seed, key, prompt.tokens)
                    sampling = SamplingParams(temperature=prompt.temperature, ignore_eos=not prompt.ends)
                    [completion] = await self._generate(prompt.ids, (branch,), sampling, None)
                    return list(require_ids(completion.token_ids))

            return list(await asyncio.gather(*(one(*each) for each in enumerate(prompts))))

        # The same problems come again in other turns, and an n-gram drafter would have learned their texts.
        with self._measured(way, remembers=False) as measured:
            return measured(self._loop.run(work()))

    def best_of(self, prompts: Sequence[Prompt], branches: int, seed: int, way: str = SPECULATIVE) -> Solved:
        async def work() -> list[list[int]]:
            texts: list[list[int]] = []
            for place, prompt in enumerate(prompts):
                asked = tuple(Branch(seed + place, key, prompt.tokens) for key in range(branches))
                sampling = SamplingParams(temperature=prompt.temperature, ignore_eos=not prompt.ends)
                completions = await self._generate(prompt.ids, asked, sampling, None)
                texts += [list(require_ids(completion.token_ids)) for completion in completions]
            return texts

        with self._measured(way, remembers=False) as measured:
            return measured(self._loop.run(work()))

    def search(self, prompts: Sequence[Prompt], seed: int, way: str = SPECULATIVE) -> Solved:
        with self._measured(way, remembers=True) as measured:
            return measured([self._loop.run(self._tree(prompt, seed, place)) for place, prompt in enumerate(prompts)])

    async def _tree(self, prompt: Prompt, seed: int, place: int) -> list[int]:
        """Run one tree search and return all generated tokens."""
        noise = random.Random(f"{seed} {place}")
        sampling = SamplingParams(temperature=prompt.temperature, stop=("\n\n",))
        pin_key = f"search {self._runs} {place}"
        paths, samples = [prompt.ids], _BEAMS
        parts: list[int] = []
        for turn in range(_ROUNDS):
            keys = iter(range(turn * _BEAMS, (turn + 1) * _BEAMS))
            asked = [tuple(Branch(seed + place, next(keys), prompt.tokens) for _ in range(samples)) for _ in paths]
            rounds = await asyncio.gather(
                *(
                    self._generate(path, branches, sampling, pin_key)
                    for path, branches in zip(paths, asked, strict=True)
                )
            )
            parts += [token for some in rounds for one in some for token in require_ids(one.token_ids)]
            going = [
                (*path, *require_ids(one.token_ids))
                for path, some in zip(paths, rounds, strict=True)
                for one in some
                if one.stop == "\n\n"
            ]
            if not going:
                break
            paths, samples = noise.sample(going, min(_SURVIVORS, len(going))), _BEAMS // _SURVIVORS
        await self._engine.release(pin_key)
        return parts

    async def _generate(
        self, prompt: tuple[int, ...], branches: tuple[Branch, ...], sampling: SamplingParams, pin_key: str | None
    ) -> list[Completion]:
        self._runs += 1
        request = GenerateRequest(f"request {self._runs}", "model", prompt, branches, sampling, pin_key=pin_key)
        found = [event async for event in self._engine.generate(request) if isinstance(event, Completion)]
        return sorted(found, key=lambda one: one.index)

    def imitate(self, texts: list[list[int]], right: float) -> None:
        if right not in self._simulated:
            drafter = _SimulatedDrafter(right, self._core.model.info.vocab_size)
            self._simulated[right] = self._speculator(drafter, AdaptiveController(8, MAX_NODES))
        self._ways[SPECULATIVE] = speculator = self._simulated[right]
        assert isinstance(speculator.drafter, _SimulatedDrafter)
        speculator.drafter.texts = texts

    @property
    def _core(self) -> EngineCore:
        return self._engine._cores["model"]

    def _speculator(self, drafter: Drafter, controller: Controller) -> Speculator:
        speculator = Speculator(drafter, controller, context=self._core.model.info.context, trees=True)
        # On the engine's thread, like every call of the engine.
        self._engine._post(partial(speculator.reset, self._core.cache))
        return speculator

    def _set_speculator(self, speculator: Speculator | None, *, remembers: bool) -> None:
        """Set the speculator of the next runs, or None for plain decoding, and empty the caches; recorded steps stay.
        ``remembers``: False to also reset the n-grams of earlier runs.
        """
        self._core.runner.speculator = speculator
        self._core.clear_cache()
        if speculator is not None and isinstance(speculator.drafter, NgramDrafter) and not remembers:
            speculator.drafter.reset(self._core.cache)

    @contextmanager
    def _measured(self, way: str, *, remembers: bool) -> Iterator[Callable[[list[list[int]]], Solved]]:
        self._engine._post(partial(self._set_speculator, self._ways[way], remembers=remembers))
        self._loop.run(self._engine.clear_cache())  # the awaited call runs after the posted one
        before, start = self._core.stats, time.perf_counter()

        def measured(texts: list[list[int]]) -> Solved:
            seconds, after = time.perf_counter() - start, self._core.stats
            names = ("drafted_tokens", "accepted_tokens", "prompt_tokens", "cached_tokens")
            return Solved(seconds, texts, *(getattr(after, name) - getattr(before, name) for name in names))

        yield measured


class _SimulatedDrafter:
    """Simulated drafter without cost, which proposes each token of given texts correctly with a given probability."""

    kind = "simulated"
    hidden_state_needs = HiddenStateNeeds.NONE
    observed_layers: tuple[int, ...] = ()
    key_shapes: tuple[HeadShape, ...] = ()

    def __init__(self, right: float, vocab: int) -> None:
        self.texts: list[list[int]] = []
        """Texts by branch key."""
        self._right, self._vocab = right, vocab
        self._noise = random.Random(0)

    def reset(self, cache: KVCache) -> None:
        pass

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(wish.sequence, wish.depth) for wish in wishes]

    def _draft(self, sequence: GenerateSequence, depth: int) -> Draft:
        done = len(sequence.generated)
        correct = self.texts[sequence.branch.key][done : done + depth]
        tokens = [token if self._noise.random() < self._right else (token + 1) % self._vocab for token in correct]
        return Draft.chain(tokens, [self._right] * len(tokens))

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        pass

    def release(self, sequence: GenerateSequence) -> None:
        pass

    def warm_ups(self) -> list[Callable[[], None]]:
        return []

    def clear_cache(self) -> None:
        pass


def load(
    folder: Path, threads: int, *, draft: str, always: int = 0, kv_tokens: int | None = None
) -> _SpeculativeEngine:
    """Return the engine with the checkpoint loaded and a drafter by ``draft``, with a controller, and with ``always``
    draft tokens per step if not 0.
    """
    torch.set_num_threads(threads)
    return _SpeculativeEngine(folder, draft, always, kv_tokens)
