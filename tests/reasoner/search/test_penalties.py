"""Frequency and presence penalty of a job, on the real engine, compared with their definition in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import Capability, InvalidRequest, ModelInfo, TokenizeRequest
from reasoner.admission.refusal import JobRefused
from reasoner.admission.resolve import resolve_job
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.run import run_job
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from workers.config.settings import Settings

BUNDLED = Path(__file__).parents[3] / "reasoner" / "bundled"
QUESTION = "Make 68 with + - * / from the numbers 10, 12, 8 and 3, each used exactly once."
FREQUENCY, PRESENCE = 0.9, 0.6
Logits = Callable[[Sequence[int]], npt.NDArray[np.float64]]


@pytest.fixture(scope="module")
def logits() -> Logits:
    """Return the policy's logits of the next token by transformers."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED / "policy", dtype=torch.float32)

    def compute(tokens: Sequence[int]) -> npt.NDArray[np.float64]:
        with torch.no_grad():
            return np.asarray(model(torch.tensor([list(tokens)])).logits[0, -1].double().numpy())

    return compute


def penalise(values: npt.NDArray[np.float64], written: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return OpenAI's formula, token by token."""
    values = values.copy()
    for token, count in Counter(written).items():
        values[token] -= FREQUENCY * count + PRESENCE
    return values


async def solve(options: EngineOptions, **fields: Any) -> tuple[list[int], MemoryJournal]:
    """Return the tokens of the question, and the journal of the job."""
    engine = LocalEngine({"policy": BUNDLED / "policy", "prm": BUNDLED / "prm"}, options)
    common: dict[str, Any] = {"problem": QUESTION, "seed": 5, "model": "policy", "verifier": None}
    spec, journal = build_spec(common | fields), MemoryJournal()
    try:
        await run_job(spec, engine, journal)
        return list(await engine.tokenize(TokenizeRequest("policy", spec.to_messages()))), journal
    finally:
        await engine.close()


def branches(journal: MemoryJournal) -> dict[str, list[int]]:
    """Return the tokens of each node."""
    tokens: dict[str, list[int]] = {}
    for entry in journal.entries:
        if entry.type == "node":
            tokens.setdefault(entry.data["node"], []).extend(entry.data["token_ids"])
    return tokens


@pytest.mark.parametrize("draft", ["off", "ngram"])
@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": {"name": "greedy"}},
        {
            "strategy": {"name": "beam", "n": 1},
            "verifier": {"kind": "prm", "model": "prm"},
            "steps": {"by": "tokens", "every": 7},
        },
    ],
    ids=["whole", "steps"],
)
async def test_greedy_solutions_equal_the_definition_whole_or_by_steps(
    fields: dict[str, Any], draft: str, logits: Logits
) -> None:
    """Steps are requests of their own, whose prompt holds the earlier ones."""
    sampling = {"temperature": 0, "frequency_penalty": FREQUENCY, "presence_penalty": PRESENCE, "max_tokens": 40}
    prompt, journal = await solve(EngineOptions(kv_tokens=8192, draft=draft), sampling=sampling, **fields)
    nodes = branches(journal)
    assert (len(nodes) > 1) == ("steps" in fields)
    lines = [[name[: end + 1] for end in range(0, len(name), 2)] for name in nodes]
    solutions = [[token for name in line for token in nodes[name]] for line in lines]
    assert max(map(len, solutions)) > 30
    for written in solutions:
        expected: list[int] = []
        while len(expected) < len(written):
            expected.append(int(np.argmax(penalise(logits(prompt + expected), expected))))
        assert written == expected


async def test_sampled_tokens_have_the_penalised_distribution(logits: Logits) -> None:
    """The first token is sampled without penalties, the second with those of the first."""
    temperature = 1.3
    sampling = {"temperature": temperature, "frequency_penalty": FREQUENCY, "presence_penalty": PRESENCE}
    strategy = {"name": "self_consistency", "n": 256}
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(4):
        options = EngineOptions(kv_tokens=8192, draft="off")
        prompt, journal = await solve(options, seed=seed, sampling=sampling | {"max_tokens": 2}, strategy=strategy)
        counts.update(tuple(tokens) for tokens in branches(journal).values())
    assert counts.total() == 4 * 256
    probabilities: dict[tuple[int, ...], float] = {}
    for first, share in enumerate(_softmax(logits(prompt) / temperature)):
        if share < 1e-3:
            continue
        after = _softmax(penalise(logits([*prompt, first]), [first]) / temperature)
        probabilities |= {(first, second): float(share * part) for second, part in enumerate(after)}
    likely = [pair for pair, share in probabilities.items() if share * counts.total() >= 8]
    expected = np.array([probabilities[pair] for pair in likely]) * counts.total()
    observed = np.array([counts[pair] for pair in likely])
    rest = counts.total() - expected.sum(), counts.total() - observed.sum()
    assert len(likely) > 8
    assert chisquare([*observed, rest[1]], [*expected, rest[0]]).pvalue > 1e-3


def _softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    exponents = np.exp(values - values.max())
    return np.asarray(exponents / exponents.sum())


class Server(ScriptedEngine):
    """A server of others."""

    def __init__(self, *missing: str, **options: Any) -> None:
        super().__init__(**options)
        self._missing = frozenset(missing)

    async def models(self) -> list[ModelInfo]:
        policy, prm = await super().models()
        can_do = frozenset(Capability) - self._missing
        return [ModelInfo(policy.id, "generate", policy.context, 100, 1000, capabilities=can_do), prm]


@pytest.mark.parametrize(
    ("lacks", "fields", "field", "message"),
    [
        (("penalties",), {}, "sampling.presence_penalty", "does not penalize tokens as OpenAI does"),
        (
            ("penalty_continuation",),
            {"strategy": {"name": "budget_forcing"}},
            "strategy",
            "continues unfinished solutions, here with penalties.*use one of greedy, self_consistency",
        ),
        (("penalty_continuation",), {"tools": [{"type": "python"}]}, "sampling.presence_penalty", "output of a tool"),
    ],
)
async def test_what_a_server_cannot_count_is_refused_by_name(
    lacks: tuple[str, ...], fields: dict[str, Any], field: str, message: str
) -> None:
    job = {"problem": QUESTION, "model": "policy", "verifier": None, "sampling": {"presence_penalty": 0.5}} | fields
    with pytest.raises(JobRefused, match=message) as refusal:
        await resolve_job(JobRequest.model_validate(job), Settings(), Server(*lacks))
    assert refusal.value.field == field


async def test_a_solution_is_one_request_where_the_server_counts_one_alone() -> None:
    engine = Server("penalty_continuation", context=2000)
    job: dict[str, Any] = {"problem": "?", "seed": 5, "model": "policy", "verifier": None, "budget": {"tokens": 900}}
    job |= {"strategy": {"name": "self_consistency", "n": 8}, "sampling": {"frequency_penalty": 1.0}}
    await run_job(build_spec(job), engine, MemoryJournal())
    sent = [branch for request in engine.requests for branch in request.branches]
    assert len(sent) == len({branch.key for branch in sent}) > 1
    assert not any(branch.generated for branch in sent)
    thinking = job | {"thoughts": {"open": "<think>", "close": "</think>"}}
    with pytest.raises(InvalidRequest, match="what follows a thought is another one"):
        await run_job(build_spec(thinking), Server("penalty_continuation", thinks=True), MemoryJournal())
