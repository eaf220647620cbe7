"""Step labels by Monte-Carlo rollouts: the fraction of right answers among completions from the end of a step.

A policy generates solutions of problems with known answers. From the end of each step it completes the solution several
times. The soft label of the step is the fraction of right completions, the hard label is 1 if any was right; the last
step's label is the correctness of the solution itself.

Source: Wang et al. 2023, "Math-Shepherd", https://arxiv.org/abs/2312.08935, section 3.3.

Every result of the engine is written to the output before it is used, so an interrupted run resumes without generating
anything twice. The noise of a branch depends on the seed and its index alone, so a resumed run gives the same labels.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

from engine.protocol.request_checks import has_ids
from engine.protocol.types import (
    Branch,
    Completion,
    EngineClient,
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    SamplingParams,
    TokenizeRequest,
    Tokens,
    list_answering,
)
from engine.protocol.wire import read_tokens, write_tokens
from prm.rollouts.file import LabelledSolution, RolloutFile, SampledStep, SolutionKey


@dataclass(frozen=True, slots=True)
class RolloutProblem:
    """A question with an answer that can be checked."""

    id: str
    question: str
    examples: tuple[tuple[str, str], ...] = ()
    """Questions with solutions that the policy sees before the question, as turns of the chat."""

    @property
    def key(self) -> str:
        """Short hash of id and question."""
        return blake2b(f"{self.id}\0{self.question}".encode(), digest_size=8).hexdigest()


Judge = Callable[[RolloutProblem, str, bool], Awaitable[bool]]
"""Function that returns True if a solution's text states the right answer.

Its last argument is True if the solution ended by itself, not at a limit.
"""
PLACEHOLDER = "{problem}"


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Settings of the rollouts. All but ``concurrency``, which does not affect the labels, are written to the file."""

    model: str
    system: str | None = None
    """System message before each question."""
    prompt: str | None = None
    """Template of the questions, in which ``{problem}`` stands for the question; ``None``: the question alone."""
    solutions: int = 8
    """Number of solutions for each problem."""
    completions: int = 8
    """Number of completions for each step except the last; 0: each step is labelled by its solution's own outcome, an
    unbiased sample of one completion, for a fraction of the tokens."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters by their names in ``SamplingParams``; the model's own fill in the others."""
    stop: tuple[str, ...] = ()
    """Texts that end a solution and are left out of it."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    max_tokens: int = 1024
    """Maximum length of a solution in tokens, including completions."""
    separator: str = "\n\n"
    early: bool = False
    """True for hard labels only, at less cost.

    A step's completions stop at the first right one, and after a step without a right completion all later steps but
    the last count as wrong without completions.
    """
    seed: int = 0
    concurrency: int = 16
    """Maximum number of concurrent solutions."""


@dataclass(slots=True)
class RolloutStats:
    """Progress of a run. Token counts are those of this run; the other counts include the file's earlier runs."""

    solutions: int = 0
    steps: int = 0
    good: int = 0
    """Number of steps with a good hard label."""
    generated: int = 0
    prompt: int = 0
    """Number of prompt tokens of all requests."""
    cached: int = 0
    """Number of these prompt tokens that were cached."""


async def roll_out(
    problems: Iterable[RolloutProblem],
    plan: RolloutPlan,
    engine: EngineClient,
    judge: Judge,
    path: Path,
    on_progress: Callable[[RolloutStats], None] = lambda _: None,
) -> RolloutStats:
    """Label solutions of all problems and append them to the file, in the format of ``prm.rollouts.file``.

    ``problems`` is read lazily, as work starts. Raises the engine's errors and ``BadRecord``; after these, and after a
    cancellation, the same call resumes.
    """
    info = await _find_model(engine, plan.model)
    sampling = {"temperature": 1.0, **info.sampling, **plan.sampling}
    settings = {name: value for name, value in asdict(plan).items() if name not in ("concurrency", "sampling")}
    settings |= {"stop": list(plan.stop), **sampling}
    with RolloutFile(path, settings) as file:
        run = _Run(
            plan, info.context, sampling=sampling, engine=engine, judge=judge, file=file, on_progress=on_progress
        )
        work = _list_work(problems, plan.solutions)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(plan.concurrency):
                    group.create_task(run.work(work))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    return run.stats


async def _find_model(engine: EngineClient, model: str) -> ModelInfo:
    served = {info.id: info for info in await list_answering(engine) if info.kind == "generate"}
    if model not in served:
        raise InvalidRequest(f"model {model!r} is not served; served are {', '.join(served) or 'none'}", "model")
    return served[model]


def _list_work(problems: Iterable[RolloutProblem], solutions: int) -> Iterator[tuple[RolloutProblem, SolutionKey]]:
    seen: set[str] = set()
    for problem in problems:
        if problem.key not in seen:
            seen.add(problem.key)
            yield from ((problem, (problem.key, index)) for index in range(solutions))


@dataclass(slots=True)
class _Run:
    plan: RolloutPlan
    context: int
    sampling: dict[str, Any]
    """Sampling parameters: the plan's, else the model's own."""
    engine: EngineClient
    judge: Judge
    file: RolloutFile
    on_progress: Callable[[RolloutStats], None]
    stats: RolloutStats = field(default_factory=RolloutStats)

    async def work(self, work: Iterator[tuple[RolloutProblem, SolutionKey]]) -> None:
        """Label solutions until none is left; concurrent workers share the iterator."""
        for problem, key in work:
            if key not in self.file.done:
                try:
                    await self._label(problem, key)
                except InvalidRequest as error:
                    raise InvalidRequest(f"problem {problem.id}: {error}", error.field) from None
            self.stats.solutions += 1
            self.stats.steps, self.stats.good = self.file.steps, self.file.good
            self.on_progress(self.stats)

    async def _label(self, problem: RolloutProblem, key: SolutionKey) -> None:
        prompt = await self.engine.tokenize(
            TokenizeRequest(
                self.plan.model, self._build_messages(problem), template_kwargs=self.plan.chat_template_kwargs
            )
        )
        pin_key = f"rollouts-{uuid.uuid4().hex}"  # keeps the prefixes of the steps in the cache
        pieces = await self._solve(prompt, key, pin_key)
        ends = [index for index, piece in enumerate(pieces) if piece.text.strip()]
        shares: list[float] = []
        finished = self._num_tokens_left(prompt, ()) > sum(len(piece.ids) for piece in pieces)
        if ends and not self.plan.completions:
            shares = [float(await self.judge(problem, _join_text(pieces), finished))] * len(ends)
        for step, end in enumerate(ends[len(shares) :]):
            so_far = pieces[: end + 1]
            if step == len(ends) - 1:
                shares.append(float(await self.judge(problem, _join_text(pieces), finished)))
            elif self.plan.early and shares and shares[-1] == 0:
                shares.append(0.0)
            else:
                shares.append(
                    await self._complete(problem, key, step=step, prompt=prompt, so_far=so_far, pin_key=pin_key)
                )
        await self.engine.release(pin_key)
        steps = tuple(pieces[end].text.removesuffix(self.plan.separator).strip() for end in ends)
        hard = tuple(int(share > 0) for share in shares)
        soft = None if self.plan.early else tuple(shares)
        ids = prompt if has_ids(prompt) else ()
        solution = LabelledSolution(
            problem.id, problem.question, prompt=ids, steps=steps, hard=hard, soft=soft, examples=problem.examples
        )
        self.file.finish(key, solution)

    def _build_messages(self, problem: RolloutProblem) -> list[dict[str, str]]:
        question = (self.plan.prompt or PLACEHOLDER).replace(PLACEHOLDER, problem.question)
        turns = [*chain.from_iterable(problem.examples), question]
        system = [] if self.plan.system is None else [{"role": "system", "content": self.plan.system}]
        messages = [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(turns)]
        return system + messages

    async def _solve(self, prompt: Tokens, key: SolutionKey, pin_key: str) -> list[SampledStep]:
        """Generate a solution step by step, so that the token ids at each step's end are known."""
        pieces = self.file.pieces(key)
        while not (pieces and pieces[-1].ended):
            generated = _read_tokens(pieces, prompt)
            num_left = self._num_tokens_left(prompt, generated)
            branch = Branch(self.plan.seed, _noise_key(*key), num_left)
            stop = tuple(dict.fromkeys((self.plan.separator, *self.plan.stop)))
            async with aclosing(self._generate(prompt + generated, (branch,), pin_key, stop=stop)) as completions:
                async for completion in completions:
                    at_limit = len(completion.token_ids) == num_left
                    ended = completion.stop != self.plan.separator or completion.stop in self.plan.stop or at_limit
                    text = self._text_before_stop(_join_text(pieces), completion)
                    self.file.add_piece(key, SampledStep(text, tuple(write_tokens(completion.token_ids)), ended))
            pieces = self.file.pieces(key)
        return pieces

    async def _complete(
        self,
        problem: RolloutProblem,
        key: SolutionKey,
        step: int,
        prompt: Tokens,
        so_far: list[SampledStep],
        pin_key: str,
    ) -> float:
        """Return the fraction of right completions from the end of a step."""
        verdicts = self.file.verdicts(key, step)
        missing = [index for index in range(self.plan.completions) if index not in verdicts]
        if missing and not (self.plan.early and any(verdicts.values())):
            generated = _read_tokens(so_far, prompt)
            num_left = self._num_tokens_left(prompt, generated)
            branches = tuple(Branch(self.plan.seed, _noise_key(*key, step, index), num_left) for index in missing)
            async with aclosing(
                self._generate(prompt + generated, branches, pin_key, stop=self.plan.stop)
            ) as completions:
                async for completion in completions:
                    index = missing[completion.index]
                    finished = completion.finish_reason == "stop"
                    before = _join_text(so_far)
                    text = before + self._text_before_stop(before, completion)
                    right = await self.judge(problem, text, finished)
                    self.file.add_verdict(key, step, index, right=right, tokens=len(completion.token_ids))
                    if right and self.plan.early:
                        break
            verdicts = self.file.verdicts(key, step)
        return sum(verdicts.values()) / len(verdicts)

    def _text_before_stop(self, before: str, completion: Completion) -> str:
        """Return the completion's text without a stop string of the plan that ended it, and what follows it."""
        if completion.stop not in self.plan.stop:
            return completion.text
        end = (before + completion.text).find(str(completion.stop))
        return completion.text[: max(0, end - len(before))]

    def _num_tokens_left(self, prompt: Tokens, generated: Tokens) -> int:
        """Return the number of tokens that a solution may still get. Raises ``InvalidRequest`` if there is none."""
        num_left = min(self.plan.max_tokens, self.context - len(prompt)) - len(generated)
        if num_left <= 0:
            raise InvalidRequest(f"its prompt of {len(prompt)} tokens fills the context of {self.context}", "prompt")
        return num_left

    async def _generate(
        self, prompt: Tokens, branches: tuple[Branch, ...], pin_key: str, *, stop: tuple[str, ...]
    ) -> AsyncGenerator[Completion, None]:
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            model=self.plan.model,
            prompt=prompt,
            branches=branches,
            sampling=SamplingParams(**self.sampling, stop=stop),
            pin_key=pin_key,
        )
        left = len(branches)
        events = self.engine.generate(request)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Completion):
                    if event.finish_reason in ("cancelled", "timeout"):
                        raise EngineUnavailable(f"the engine ended a branch with {event.finish_reason!r}")
                    left -= 1
                    self.stats.generated += len(event.token_ids)
                    self.stats.prompt += event.prompt_tokens
                    self.stats.cached += event.cached_tokens
                    yield event
        if left:
            raise EngineUnavailable("the engine's answer ended before all of its branches had")


def _join_text(pieces: list[SampledStep]) -> str:
    return "".join(piece.text for piece in pieces)


def _read_tokens(pieces: list[SampledStep], prompt: Tokens) -> Tokens:
    return tuple(token for piece in pieces for token in read_tokens(piece.ids, prompt))


def _noise_key(*branch: object) -> int:
    return int.from_bytes(blake2b(repr(branch).encode(), digest_size=8).digest(), "big") >> 1
