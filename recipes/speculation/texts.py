"""Texts that the target itself generates: what heads learn from, and what they are judged by.

A text depends on the seed and its number alone. Shards of texts are written when they are complete, so that a command
that was stopped goes on with the shard that it was at.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from engine.core.local_engine import LocalEngine
from engine.protocol.types import Branch, Completion, GenerateRequest, InvalidRequest, SamplingParams
from engine.text.tokenizer import Tokenizer
from reasoner.evaluation.suites.registry import SUITES, get_family, load_problems
from recipes.speculation.target import Target

SEED = 7
SHARD = 256
HELD_OUT = 20
"""One line of a file of prompts in so many is held out."""


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids. ``temperature``: what the text was sampled at, 0 for the likeliest tokens."""

    prompt: list[int]
    tokens: list[int]
    temperature: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a text is asked for with."""

    text: str
    temperature: float


class Prompts:
    """Prompts by number: problems of the suites' training split, or the lines of a file, over and over."""

    def __init__(self, file: Path | None, temperature: float) -> None:
        """``temperature``: for the lines of a file; a suite has its own. Every third text is greedy."""
        self._lines = None if file is None else [line for line in file.read_text("utf-8").splitlines() if line.strip()]
        self._temperature = temperature
        if self._lines is not None and len(self._lines) < HELD_OUT:
            raise SystemExit(f"{file} has {len(self._lines)} prompts; at least {HELD_OUT} are needed")

    def training(self, number: int) -> Prompt:
        if self._lines is not None:
            lines = [line for place, line in enumerate(self._lines) if place % HELD_OUT]
            return self._heated(lines[number % len(lines)], self._temperature, number)
        suite = get_family(SUITES[number % len(SUITES)])
        level = suite.LEVELS[number // len(SUITES) % len(suite.LEVELS)]
        problem = suite.generate_problem("train", f"speculation/{number}", level)
        return self._heated(problem.text, suite.TEMPERATURE, number)

    def held_out(self, count: int) -> list[Prompt]:
        """``count`` prompts, or as many as there are, that training never sees."""
        if self._lines is not None:
            return [Prompt(line, self._temperature) for line in self._lines[::HELD_OUT][:count]]
        each = count // len(SUITES)
        return [
            Prompt(one.text, get_family(name).TEMPERATURE) for name in SUITES for one in load_problems(name, limit=each)
        ]

    def _heated(self, text: str, temperature: float, number: int) -> Prompt:
        # 3 has no divisor in common with the number of suites and levels, so greedy texts are of every kind.
        return Prompt(text, 0.0 if number % 3 == 2 else temperature)


class Author:
    """Lets the target write: with this engine on the CPU, with transformers elsewhere."""

    def __init__(self, target: Target, limit: int) -> None:
        """``limit``: most tokens of a text."""
        self._target, self._limit = target, limit
        self._tokenizer = Tokenizer(target.folder, target.config.vocab_size)
        self._engine = LocalEngine({"target": target.folder}) if target.device == "cpu" else None

    def training(self, prompts: Prompts, tokens: int, folder: Path) -> list[Text]:
        """Texts with at least ``tokens`` generated tokens in all; those in ``folder`` are not made again."""
        folder.mkdir(parents=True, exist_ok=True)
        found: list[Text] = []
        shard = 0
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("texts", total=tokens)
            while sum(len(text.tokens) for text in found) < tokens:
                path = folder / f"{shard:05d}.jsonl"
                if not path.exists():
                    numbers = range(shard * SHARD, (shard + 1) * SHARD)
                    made = self.write([prompts.training(number) for number in numbers], SEED + shard)
                    new = path.with_suffix(".new")
                    new.write_text("".join(json.dumps(asdict(text)) + "\n" for text in made))
                    os.replace(new, path)
                found += [Text(**json.loads(line)) for line in path.read_text().splitlines()]
                shard += 1
                bar.update(task, completed=sum(len(text.tokens) for text in found))
        return found

    def write(self, prompts: Sequence[Prompt], seed: int) -> list[Text]:
        """A text for each prompt."""
        ids = [self.encode(prompt.text) for prompt in prompts]
        if self._engine is not None:
            return asyncio.run(self._here(self._engine, prompts, ids, seed))
        torch.manual_seed(seed)
        return [text for some in _alike(prompts, ids) for text in self._there(some)]

    def encode(self, text: str) -> list[int]:
        """A prompt as the first message of a chat, or as it is for a model without a template for that."""
        try:
            return list(self._tokenizer.encode_chat([{"role": "user", "content": text}]))
        except InvalidRequest:
            return list(self._tokenizer.encode_prompt(text))

    def close(self) -> None:
        """Frees the engine."""
        if self._engine is not None:
            asyncio.run(self._engine.close())

    async def _here(
        self, engine: LocalEngine, prompts: Sequence[Prompt], ids: Sequence[list[int]], seed: int
    ) -> list[Text]:
        context = (await engine.models())[0].context

        async def one(number: int, temperature: float, tokens: list[int]) -> Text:
            branch = Branch(seed=seed, key=number, max_tokens=min(self._limit, context - len(tokens)))
            sampling = SamplingParams(temperature=temperature)
            request = GenerateRequest(str(number), "target", tuple(tokens), (branch,), sampling)
            async for event in engine.generate(request):
                if isinstance(event, Completion):
                    return Text(tokens, list(event.token_ids), temperature)
            raise RuntimeError("the engine ended a text without an answer")

        return await asyncio.gather(*(one(n, prompt.temperature, ids[n]) for n, prompt in enumerate(prompts)))

    def _there(self, texts: Sequence[Text]) -> Iterator[Text]:
        """The texts with their tokens, of one temperature."""
        target, temperature = self._target, texts[0].temperature
        longest = max(len(text.prompt) for text in texts)
        padded = [[0] * (longest - len(text.prompt)) + text.prompt for text in texts]
        mask = [[0] * (longest - len(text.prompt)) + [1] * len(text.prompt) for text in texts]
        made = target.model.generate(
            input_ids=torch.tensor(padded, device=target.device),
            attention_mask=torch.tensor(mask, device=target.device),
            max_new_tokens=min(self._limit, target.config.max_context - longest),
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_k=None,
            top_p=None,
            pad_token_id=0,
        )
        ends = set(target.config.eos)
        for text, row in zip(texts, made[:, longest:].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
            yield replace(text, tokens=row[:end])


def _alike(prompts: Sequence[Prompt], ids: Sequence[list[int]], rows: int = 64) -> Iterator[list[Text]]:
    """Texts that are only begun, in groups of one temperature and similar length."""
    texts = [Text(tokens, [], prompt.temperature) for prompt, tokens in zip(prompts, ids, strict=True)]
    texts.sort(key=lambda text: (text.temperature, len(text.prompt)))
    for _, same in itertools.groupby(texts, key=lambda text: text.temperature):
        members = list(same)
        yield from (members[start : start + rows] for start in range(0, len(members), rows))
