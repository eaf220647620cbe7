"""Rollouts on an engine with known success probabilities: distribution of the labels, and runs stopped anywhere."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import comb
from pathlib import Path
from typing import Any, ClassVar

import pytest
from scipy.stats import chi2

from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenizeRequest,
)
from engine.remote.chat.options import ChatOptions
from prm.records import BadRecord, read_records
from prm.rollouts.rollouts import RolloutPlan, RolloutProblem, RolloutStats, roll_out
from prm.training.data import Example, read_examples
from prm.training.probe_data import read_rollouts
from tests.engine.remote.test_chat import Hosted, fresh, said, stream, usage
from tests.seeds import shift

__all__ = ["fresh"]  # the fixture holds here, too

STEPS = 3
BAD = 0.3
"""Probability that a step is bad."""
RIGHT = (0.9, 0.4, 0.05, 0.0)
"""Probability of a right answer, by the number of bad steps."""
TEXTS = {1: "good\n\n", 2: "bad\n\n", 3: "\\boxed{yes}", 4: "\\boxed{no}"}
PLAN = RolloutPlan("policy", solutions=2, completions=8, max_tokens=64, seed=3, concurrency=5)
PROBLEMS = [RolloutProblem(f"p{i}", f"question {i}") for i in range(12)]


class World:
    """Engine with four tokens: good and bad steps, then a right or wrong answer.

    It fails after ``lives`` answers.
    """

    def __init__(self, lives: int | None = None, context: int = 100) -> None:
        self.drawn: list[tuple[int, int]] = []
        """(branch key, position) of every token returned."""
        self.running = 0
        self.pin_keys: set[str | None] = set()
        self._lives = lives
        self._context = context
        self._order = random.Random(shift(lives or 0))

    async def models(self) -> list[ModelInfo]:
        return [ModelInfo("policy", "generate", self._context, 5, 10), ModelInfo("prm", "classify", 100, 5, 10)]

    async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
        return (0,) * 10

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncGenerator[Completion | Delta]:
        self.pin_keys.add(request.pin_key)
        self.running += 1
        try:
            for index in self._order.sample(range(len(request.branches)), len(request.branches)):
                for _ in range(self._order.randrange(3)):
                    await asyncio.sleep(0)
                if self._lives is not None:
                    self._lives -= 1
                    if self._lives < 0:
                        raise EngineUnavailable("the engine is gone")
                yield self._complete(request, index)
        finally:
            self.running -= 1

    def _complete(self, request: GenerateRequest, index: int) -> Completion:
        branch, ids = request.branches[index], list(request.prompt[10:])
        reason, stop = "length", None
        for _ in range(branch.max_tokens):
            self.drawn.append((branch.key, len(ids)))
            ids.append(_draw(branch, ids))
            if ids[-1] > 2:
                reason, stop = "stop", 0
                break
            if request.sampling.stop:
                reason, stop = "stop", "\n\n"
                break
        new = tuple(ids[len(request.prompt) - 10 :])
        text = "".join(TEXTS[token] for token in new)
        return Completion(index, new, text, reason, stop, 0.0, len(request.prompt), 4)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        raise NotImplementedError

    async def abort(self, request_id: str) -> None:
        raise NotImplementedError

    async def release(self, pin_key: str, tokens: Sequence[int] | None = None) -> None:
        self.pin_keys.discard(pin_key)

    async def clear_cache(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


def _draw(branch: Branch, ids: Sequence[int]) -> int:
    noise = blake2b(f"{branch.seed} {branch.key} {len(ids)}".encode(), digest_size=7).digest()
    unit = int.from_bytes(noise, "big") / 2**56
    if len(ids) < STEPS:
        return 2 if unit < BAD else 1
    return 3 if unit < RIGHT[sum(token == 2 for token in ids)] else 4


async def judge(problem: RolloutProblem, text: str, finished: bool) -> bool:
    await asyncio.sleep(0)
    return text.endswith("\\boxed{yes}")


def chance(steps: int, bad: int) -> float:
    """Return the probability of a right answer after the given steps."""
    left = STEPS - steps
    return sum(comb(left, k) * BAD**k * (1 - BAD) ** (left - k) * RIGHT[bad + k] for k in range(left + 1))


def p_value(groups: Iterable[tuple[float, int, float]]) -> float:
    """Return Pearson's p-value of (successes, tries, probability) groups, over all that are large enough."""
    terms = [
        (seen - tries * each) ** 2 / (tries * each * (1 - each))
        for seen, tries, each in groups
        if min(each, 1 - each) * tries >= 10
    ]
    assert len(terms) >= 4
    return float(chi2.sf(sum(terms), len(terms)))


def examples(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the examples by problem, in the order of their solutions."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in sorted((r.fields for r in read_records(path) if "steps" in r.fields), key=lambda f: f["solution"]):
        found[record["id"]].append(dict(record))
    return dict(found)


async def test_labels_have_the_distribution_of_completions(tmp_path: Path) -> None:
    """Soft labels are binomial fractions with the exact probability; hard labels are 1 if any completion was right."""
    problems = [RolloutProblem(f"p{i}", f"question {i}") for i in range(400)]
    await roll_out(problems, PLAN, World(), judge, tmp_path / "out.jsonl")
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for example in read_examples(tmp_path / "out.jsonl", "soft"):
        assert len(example.steps) == STEPS + 1
        for step in range(1, STEPS + 1):
            groups[step, example.steps[:step].count("bad")].append(example.labels[step - 1])
    right = {at: (8 * sum(shares), 8 * len(shares), chance(*at)) for at, shares in groups.items()}
    none = {at: (shares.count(0.0), len(shares), (1 - chance(*at)) ** 8) for at, shares in groups.items()}
    assert p_value(right.values()) > 0.01
    assert p_value(none.values()) > 0.01
    hard = [example.labels for example in read_examples(tmp_path / "out.jsonl", "hard")]
    soft = [example.labels for example in read_examples(tmp_path / "out.jsonl", "soft")]
    assert hard == [tuple(float(share > 0) for share in shares) for shares in soft]


async def test_the_last_step_is_labelled_by_the_solution_itself(tmp_path: Path) -> None:
    await roll_out(PROBLEMS, PLAN, World(), judge, tmp_path / "out.jsonl")
    for solutions in examples(tmp_path / "out.jsonl").values():
        for one in solutions:
            assert one["soft"][-1] == float(one["steps"][-1] == "\\boxed{yes}")


@pytest.mark.parametrize("torn", [False, True])
async def test_a_repeatedly_crashed_run_ends_with_the_same_labels_and_pays_nothing_twice(
    tmp_path: Path, torn: bool
) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    undisturbed = World()
    await roll_out(PROBLEMS, PLAN, undisturbed, judge, whole)
    noise = random.Random(shift(1))
    drawn: list[tuple[int, int]] = []
    deaths = 0
    while True:
        world = World(noise.randrange(1, 60))
        try:
            await roll_out(PROBLEMS, PLAN, world, judge, broken)
            break
        except EngineUnavailable:
            deaths += 1
        finally:
            drawn += world.drawn
        if torn:  # as after a crash in the middle of a write
            data = broken.read_bytes()
            broken.write_bytes(data[: len(data) - noise.randrange(1, 40)])
    assert deaths >= 10  # every world ends before its 60th answer, and 24 solutions take 24 * (4 + 3 * 8) of them
    assert examples(broken) == examples(whole)
    if not torn:
        # Every answer that arrived is in the file, except for those that arrived together with the failure.
        wasted = len(drawn) - len(set(drawn))
        assert set(drawn) == set(undisturbed.drawn)
        assert wasted == 0


async def test_a_cancelled_run_aborts_its_requests_and_can_be_resumed(tmp_path: Path) -> None:
    path, world = tmp_path / "out.jsonl", World()
    reached = asyncio.Event()

    def show(tally: RolloutStats) -> None:
        if tally.solutions >= 5:
            reached.set()

    task = asyncio.create_task(roll_out(PROBLEMS, PLAN, world, judge, path, show))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.running == 0
    await roll_out(PROBLEMS, PLAN, World(), judge, path)
    await roll_out(PROBLEMS, PLAN, World(), judge, tmp_path / "whole.jsonl")
    assert examples(path) == examples(tmp_path / "whole.jsonl")


async def test_a_finished_run_sends_no_request_and_more_problems_can_be_added(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = await roll_out(PROBLEMS[:4], PLAN, World(), judge, path)
    before, again = path.read_bytes(), World()
    tally = await roll_out(PROBLEMS[:4], PLAN, again, judge, path)
    assert (again.drawn, path.read_bytes()) == ([], before)
    assert (tally.solutions, tally.steps, tally.good, tally.generated) == (8, first.steps, first.good, 0)
    assert (await roll_out(PROBLEMS, PLAN, World(), judge, path)).solutions == 24
    await roll_out(PROBLEMS, PLAN, World(), judge, tmp_path / "whole.jsonl")
    assert examples(path) == examples(tmp_path / "whole.jsonl")


async def test_early_ending_gives_the_hard_labels_up_to_the_first_bad_step_for_fewer_tokens(tmp_path: Path) -> None:
    full, early = World(), World()
    await roll_out(PROBLEMS, PLAN, full, judge, tmp_path / "full.jsonl")
    plan = RolloutPlan("policy", solutions=2, completions=8, max_tokens=64, seed=3, early=True)
    await roll_out(PROBLEMS, plan, early, judge, tmp_path / "early.jsonl")
    wholes, settled = examples(tmp_path / "full.jsonl"), examples(tmp_path / "early.jsonl")
    for name, solutions in wholes.items():
        for whole, one in zip(solutions, settled[name], strict=True):
            inner = whole["hard"][:-1]
            dead = inner.index(0) if 0 in inner else len(inner)
            assert one["hard"] == [*inner[:dead], *[0] * (len(inner) - dead), whole["hard"][-1]]
            assert "soft" not in one
    assert len(early.drawn) < len(full.drawn) / 2
    with pytest.raises(BadRecord, match="only hard labels"):
        list(read_examples(tmp_path / "early.jsonl", "soft"))


async def test_problems_are_read_lazily(tmp_path: Path) -> None:
    read = finished = ahead = 0

    def problems() -> Iterator[RolloutProblem]:
        nonlocal read, ahead
        for problem in PROBLEMS:
            read += 1
            ahead = max(ahead, read - finished // PLAN.solutions)
            yield problem

    def show(tally: RolloutStats) -> None:
        nonlocal finished
        finished = tally.solutions

    await roll_out(problems(), PLAN, World(), judge, tmp_path / "out.jsonl", show)
    assert ahead <= PLAN.concurrency + 1


async def test_every_lease_is_released_and_every_token_is_counted(tmp_path: Path) -> None:
    world = World()
    tally = await roll_out(PROBLEMS, PLAN, world, judge, tmp_path / "out.jsonl")
    assert world.pin_keys == set()
    assert tally.generated == len(world.drawn)
    assert tally.cached == 4 * (len(PROBLEMS) * 2 * (STEPS + 1) + len(PROBLEMS) * 2 * STEPS * 8)


async def test_a_truncated_solution_is_wrong_and_keeps_its_steps(tmp_path: Path) -> None:
    plan = RolloutPlan("policy", solutions=1, completions=2, max_tokens=2)
    await roll_out(PROBLEMS[:3], plan, World(), judge, tmp_path / "out.jsonl")
    for [one] in examples(tmp_path / "out.jsonl").values():
        assert (len(one["steps"]), one["hard"]) == (2, [0, 0])


async def test_a_problem_that_fills_the_context_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"problem p0: .* 10 tokens fills the context of 10"):
        await roll_out(PROBLEMS[:1], PLAN, World(context=10), judge, tmp_path / "out.jsonl")


async def test_a_model_that_cannot_generate_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="'prm' is not served; served are policy"):
        await roll_out(PROBLEMS[:1], RolloutPlan("prm"), World(), judge, tmp_path / "out.jsonl")


async def test_other_settings_another_model_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    await roll_out(PROBLEMS[:1], PLAN, World(), judge, path)
    with pytest.raises(BadRecord, match=r"begun with completions 8, and 4 is requested"):
        await roll_out(PROBLEMS[:1], replace(PLAN, completions=4), World(), judge, path)
    running = asyncio.create_task(roll_out(PROBLEMS, PLAN, World(), judge, path))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(BadRecord, match="being written by another run"):
        await roll_out(PROBLEMS, PLAN, World(), judge, path)
    await running
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(BadRecord, match="does not begin with 'settings'"):
        await roll_out(PROBLEMS[:1], PLAN, World(), judge, path)


def test_labelled_steps_from_other_sources_are_read_as_examples(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"question": "q", "steps": ["a", "b"], "labels": [1, 0.25]}) + "\n")
    assert list(read_examples(path, "soft")) == [Example("q", ("a", "b"), (1.0, 0.25))]
    path.write_text(json.dumps({"question": "q", "steps": ["a", "b"], "labels": [1]}) + "\n")
    with pytest.raises(BadRecord, match=r"line 1: 'labels' is .*list of 2 numbers from 0 to 1, one for each step"):
        list(read_examples(path, "soft"))


async def test_without_completions_the_outcome_labels_all_steps_and_a_probe_reads_the_tokens(tmp_path: Path) -> None:
    world = World()
    await roll_out(PROBLEMS, replace(PLAN, completions=0), world, judge, tmp_path / "out.jsonl")
    labelled = list(read_examples(tmp_path / "out.jsonl", "soft"))
    assert {len(set(example.labels)) for example in labelled} == {1}
    assert {example.labels[-1] for example in labelled} == {0.0, 1.0}
    rollouts = list(read_rollouts(tmp_path / "out.jsonl", "soft"))
    assert [rollout.labels for rollout in rollouts] == [example.labels for example in labelled]
    for rollout, example in zip(rollouts, labelled, strict=True):
        prompt = await world.tokenize(TokenizeRequest("policy", [{"role": "user", "content": example.question}]))
        assert rollout.tokens[: len(prompt)] == prompt
        starts = (len(prompt), *rollout.ends[:-1])
        texts = [
            "".join(TEXTS[token] for token in rollout.tokens[start:end]).strip()
            for start, end in zip(starts, rollout.ends, strict=True)
        ]
        assert texts == list(example.steps)


async def test_the_models_own_sampling_fills_in_what_the_plan_leaves_open(tmp_path: Path) -> None:
    class Recommending(World):
        requested: ClassVar[list[SamplingParams]] = []

        async def models(self) -> list[ModelInfo]:
            own = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
            return [replace(info, sampling=own) for info in await super().models()]

        def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncGenerator[Completion | Delta]:
            self.requested.append(request.sampling)
            return super().generate(request, stream=stream)

    for given in ({}, {"temperature": 0.9, "top_p": 0.5}):
        Recommending.requested.clear()
        await roll_out(PROBLEMS[:1], replace(PLAN, sampling=given), Recommending(), judge, tmp_path / str(len(given)))
        used = {"temperature": 0.6, "top_k": 20, "top_p": 0.9} | given
        asked = {(params.temperature, params.top_k, params.top_p) for params in Recommending.requested}
        assert asked == {(used["temperature"], used["top_k"], used["top_p"])}


async def test_a_stop_string_ends_a_solution_and_is_left_out_of_it(tmp_path: Path) -> None:
    class Babbling(World):
        """It writes one step, and then begins the next question."""

        requested: ClassVar[list[tuple[str, ...]]] = []

        def _complete(self, request: GenerateRequest, index: int) -> Completion:
            self.requested.append(request.sampling.stop)
            ids = (1,) if len(request.prompt) == 10 and "\n\n" in request.sampling.stop else (2,)
            text, stop = ("good\n\n", "\n\n") if ids == (1,) else ("5\nQuestion: 1", "\nQuestion:")
            return Completion(index, ids, text, "stop", stop, 0.0, len(request.prompt), 0)

    judged: list[str] = []

    async def keep(problem: RolloutProblem, text: str, finished: bool) -> bool:
        assert finished
        judged.append(text)
        return True

    plan = replace(PLAN, solutions=1, completions=2, stop=("\nQuestion:",))
    await roll_out(PROBLEMS[:1], plan, Babbling(), keep, tmp_path / "out.jsonl")
    (example,) = examples(tmp_path / "out.jsonl")["p0"]
    assert example["steps"] == ["good", "5"]
    assert judged == ["good\n\n5"] * 3
    assert set(Babbling.requested) == {("\n\n", "\nQuestion:"), ("\nQuestion:",)}


async def test_a_server_that_only_chats_has_texts_for_ids_and_a_run_of_an_earlier_version_goes_on(
    tmp_path: Path,
) -> None:
    def answer(body: dict[str, Any]) -> Any:
        if body["messages"][-1]["role"] == "user":
            ended = said("", "stop")
            ended["choices"][0]["stop_reason"] = "\n\n"
            return stream(said("a step"), ended, usage(9, 3))
        return stream(said("\\boxed{yes}", "stop"), usage(9, 4))

    async def run(path: Path) -> list[str]:
        hosted = Hosted(answer, ChatOptions(("m",), prefill="continue_final_message", context=100))
        plan = replace(PLAN, model="m", solutions=1, completions=0, separator="\n\n")
        await roll_out(PROBLEMS[:1], plan, hosted.engine, judge, path)
        await hosted.engine.close()
        return [body["messages"][-1]["content"] for body in hosted.bodies]

    path = tmp_path / "rollouts.jsonl"
    assert await run(path) == ["question 0", "a step\n\n"]
    settings, first, last, solution = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(first)["ids"] == ["a ", "ste", "p\n\n"]
    assert (json.loads(last)["ids"], json.loads(solution)["prompt"]) == (["\\b", "oxe", "d{y", "es}"], [])
    with pytest.raises(BadRecord, match="the prompt's tokens are missing"):
        list(read_rollouts(path, "hard"))
    packed = json.loads(first) | {"ids": [int.from_bytes(b"\x01" + text, "big") for text in (b"a st", b"ep\n\n")]}
    path.write_text(f"{settings}\n{json.dumps(packed)}\n", encoding="utf-8")
    assert await run(path) == ["a step\n\n"]
    assert path.read_text(encoding="utf-8").splitlines()[2:] == [last, solution]
