"""Verdicts that a language model writes: a critique first, then a label whose probability is read.

The model writes ``votes`` critiques as branches of one request, which share the prompt's cached prefix. Where it begins
its verdict, or at its limit, the format's own text is appended, and the distribution of the next token is read there
in a second request of one token. So a verdict does not depend on a sampled label, and a cut critique still counts.
Where no label is likely there, the model writes some tokens on, and the verdict in them counts ("**Yes**", "- No");
without one the vote is no vote: the model did not answer the question.

Source: Zhang et al. 2024, "Generative Verifiers: Reward Modeling as Next-Token Prediction", sections 3.1 to 3.3.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

from engine.protocol.types import (
    Branch,
    Capability,
    Completion,
    EngineClient,
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    SamplingParams,
    Token,
    TokenizeRequest,
    TokenLogprob,
    Tokens,
)
from engine.remote.chat.verdict import find_verdict
from prm.scorers.labels import find_label_tokens
from prm.scorers.verdict_formats import MAX_LABELS, VerdictFormat

MIN_LABEL_MASS = 0.05
"""Probability that all labels together must have to be read: where a model writes one it is far more than half."""
MAX_WRITTEN = 8
"""Tokens that a model may write behind the verdict's text if it does not begin with a label: marks, then the label."""
_REQUESTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class VerdictCost:
    """Tokens that verdicts took: computed ones, among them those that were generated, and cached ones."""

    computed: int = 0
    cached: int = 0
    generated: int = 0

    def __add__(self, other: VerdictCost) -> VerdictCost:
        return VerdictCost(self.computed + other.computed, self.cached + other.cached, self.generated + other.generated)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The votes on one prompt. ``scores`` has the expected score of each vote, ``None`` for one without a verdict."""

    critiques: tuple[str, ...]
    scores: tuple[float | None, ...]
    cost: VerdictCost

    @property
    def score(self) -> float | None:
        """Mean score of the votes that count; ``None`` if there are none."""
        counted = [score for score in self.scores if score is not None]
        return math.fsum(counted) / len(counted) if counted else None


@dataclass(frozen=True, slots=True)
class VerdictOptions:
    """Number of votes, the longest critique in tokens (0: none), and the sampling of critiques."""

    votes: int
    max_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class _Critique:
    text: str
    tokens: Tokens


class VerdictWriter:
    """Asks one served model for verdicts."""

    def __init__(
        self,
        engine: EngineClient,
        info: ModelInfo,
        verdict_format: VerdictFormat,
        options: VerdictOptions,
        seed: int,
        pin_key: str | None,
    ) -> None:
        self.info = info
        self.format = verdict_format
        self.options = options
        self._engine = engine
        self._seed = seed
        self._pin_key = pin_key
        self._slots = asyncio.Semaphore(_REQUESTS_AT_ONCE)
        self._verdict: Tokens = ()
        self._labels: dict[Token, float] = {}

    @classmethod
    async def open(
        cls,
        engine: EngineClient,
        info: ModelInfo,
        verdict_format: VerdictFormat,
        options: VerdictOptions,
        *,
        seed: int = 0,
        pin_key: str | None = None,
    ) -> Self:
        """Return a writer.

        Raises ``InvalidRequest`` for labels that are not single tokens, or a server that only chats.
        """
        if not {Capability.CONTINUATION, Capability.LOGPROBS} <= info.capabilities:
            raise InvalidRequest(
                f"verifier.model: the server of model {info.id!r} only chats, and a verdict is read behind the "
                "critique, with log-probabilities: use a model on vLLM, SGLang or our engine, or kind 'judge'",
                "verifier.model",
            )
        writer = cls(engine, info, verdict_format, options, seed, pin_key)
        await writer._find_labels()
        return writer

    async def encode(self, text: str) -> Tokens:
        """Return the tokens of the prompt that shows the model this text."""
        messages = [{"role": "user", "content": text}]
        if self.format.system is not None:
            messages.insert(0, {"role": "system", "content": self.format.system})
        return await self._engine.tokenize(TokenizeRequest(self.info.id, messages))

    def max_cost(self, prompt: Tokens) -> VerdictCost:
        """Return the most that verdicts on a prompt can take, without any cached prefix."""
        longest, votes = self.options.max_tokens, self.options.votes
        # Behind the critique the label is read, and where there is none some tokens are written.
        read = 2 * (len(prompt) + longest + len(self._verdict)) + 1 + MAX_WRITTEN
        if not longest:
            return VerdictCost(read, 0, 1 + MAX_WRITTEN)
        return VerdictCost((len(prompt) + longest + read) * votes, 0, (longest + 1 + MAX_WRITTEN) * votes)

    def fits(self, prompt: Tokens) -> bool:
        """Return True if the model's context holds the prompt, the longest critique and the verdict."""
        return len(prompt) + self.options.max_tokens + len(self._verdict) + MAX_WRITTEN <= self.info.context

    async def write(self, prompt: Tokens, key: str) -> Verdict:
        """Return the verdicts on a prompt. ``key`` names it within the job, so that its critiques are its own."""
        critiques, cost = [_Critique("", ())], VerdictCost()
        if self.options.max_tokens:
            critiques, cost = await self._write_critiques(prompt, key)
        votes = await asyncio.gather(*(self._read_label(prompt, critique) for critique in critiques))
        for _, spent in votes:
            cost += spent
        scores = [score for score, _ in votes]
        if not self.options.max_tokens:  # without a critique all votes are the same
            scores *= self.options.votes
        return Verdict(tuple(critique.text.strip() for critique in critiques), tuple(scores), cost)

    async def _write_critiques(self, prompt: Tokens, key: str) -> tuple[list[_Critique], VerdictCost]:
        branches = tuple(
            Branch(
                self._seed,
                _hash(f"{key}:{vote}"),
                max_tokens=self.options.max_tokens,
                generated=(),
                sibling=(_hash(key), vote),
            )
            for vote in range(self.options.votes)
        )
        completions = await self._generate(prompt, branches, self.options.sampling)
        return [await self._trim(completion) for completion in completions], _compute_cost(completions)

    async def _trim(self, completion: Completion) -> _Critique:
        """Return a critique without what ended it, since the verdict's text is appended as a whole."""
        stop, text = completion.stop, completion.text
        if isinstance(stop, int):  # an end-of-sequence token
            return _Critique(text, completion.token_ids[:-1])
        if stop is None:
            return _Critique(text, completion.token_ids)
        text = text[: text.rfind(stop)]
        if self.format.verdict[:1].isspace():
            text = text.rstrip()
        return _Critique(text, await self._engine.tokenize(TokenizeRequest(self.info.id, text, special=False)))

    async def _read_label(self, prompt: Tokens, critique: _Critique) -> tuple[float | None, VerdictCost]:
        """Return the score of the verdict behind a critique, ``None`` if the model gives none there, and its cost."""
        reading = SamplingParams(temperature=0.0, logprobs=MAX_LABELS, ignore_eos=True)
        read = await self._continue(prompt, critique, 1, reading)
        score = self._expect_score(read.logprobs[0]) if read.logprobs else None
        if score is not None:
            return score, _compute_cost([read])
        written = await self._continue(prompt, critique, MAX_WRITTEN, SamplingParams(temperature=0.0))
        names = list(self.format.labels)
        found = find_verdict(written.text, names)
        return (self.format.labels[names[found.index]] if found else None), _compute_cost([read, written])

    async def _continue(
        self, prompt: Tokens, critique: _Critique, max_tokens: int, sampling: SamplingParams
    ) -> Completion:
        """Return what the model writes behind a critique and the verdict's text."""
        branch = Branch(self._seed, 0, max_tokens, critique.tokens + self._verdict)
        [completion] = await self._generate(prompt, (branch,), sampling)
        return completion

    def _expect_score(self, read: TokenLogprob) -> float | None:
        """Return the expected score of the labels at a position, ``None`` if none is likely there."""
        listed: dict[Token, float] = {**dict(read.top), read.token_id: read.logprob}
        weights = {token: math.exp(listed[token]) for token in self._labels if token in listed}
        mass = math.fsum(weights.values())
        if mass < MIN_LABEL_MASS:
            return None
        return math.fsum(weight * self._labels[token] for token, weight in weights.items()) / mass

    async def _generate(
        self, prompt: Tokens, branches: tuple[Branch, ...], sampling: SamplingParams
    ) -> list[Completion]:
        request = GenerateRequest(
            f"{self._pin_key or 'verdict'}-{uuid.uuid4().hex}",
            self.info.id,
            prompt=prompt,
            branches=branches,
            sampling=sampling,
            pin_key=self._pin_key,
            draft=False,  # rejected draft tokens have no place on a verifier's bill
        )
        arrived: dict[int, Completion] = {}
        async with self._slots, aclosing(self._engine.generate(request)) as events:
            async for item in events:
                if isinstance(item, Completion):
                    arrived[item.index] = item
        if len(arrived) < len(branches):
            raise EngineUnavailable("the engine's answer ended before all critiques had")
        return [arrived[index] for index in range(len(branches))]

    async def _find_labels(self) -> None:
        """Find the tokens of the verdict's text and of each label behind it.

        Raises ``InvalidRequest`` for a label that is not one token, or not another one than the other labels.
        """
        found = await find_label_tokens(self._engine, self.info.id, self.format.verdict, self.format.labels)
        if found.others:
            raise InvalidRequest(
                f"verifier.labels: behind {self.format.verdict.strip()!r} the tokenizer of model {self.info.id!r} "
                f"does not write {', '.join(self.format.labels)} as one token each (see {found.others[0]!r}): use "
                "labels that it does, such as Yes and No, single digits or letters",
                "verifier.labels",
            )
        self._verdict = found.lead
        self._labels = {found.tokens[label]: value for label, value in self.format.labels.items()}
        await self._find_spellings()

    async def _find_spellings(self) -> None:
        """Add the tokens of the words among the labels in small and capital letters, where they are single ones."""
        for label, value in self.format.labels.items():
            others = {label.lower(), label.upper(), label.capitalize()} - {label}
            for other in sorted(others) if len(label) > 1 and label.isalpha() else ():
                tokens = await self._engine.tokenize(
                    TokenizeRequest(self.info.id, self.format.verdict + other, special=False)
                )
                if tokens[:-1] == self._verdict:
                    self._labels.setdefault(tokens[-1], value)


def _compute_cost(completions: Sequence[Completion]) -> VerdictCost:
    generated = sum(len(completion.token_ids) for completion in completions)
    read = sum(completion.prompt_tokens for completion in completions)
    cached = sum(completion.cached_tokens for completion in completions)
    return VerdictCost(read - cached + generated, cached, generated)


def _hash(key: str) -> int:
    """Return a noise key: 63 bits of the text's hash."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
