"""Strategies that write one solution from several, or name the best of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol.types import Completion, GenerateRequest, InvalidRequest, ModelInfo, TokenizeRequest
from reasoner.jobs.journal import MemoryJournal
from reasoner.strategies.merging.prompts import NOTE
from reasoner.strategies.merging.synthesize import find_named
from reasoner.strategies.registry import parse_params
from reasoner.tree import Node
from tests.reasoner.strategies.test_sampling_strategies import PROMPT, solve, told
from tests.scripted import EOS, ScriptedEngine

WIDE = 8000
SEEDS = range(8)


def decisions(journal: MemoryJournal, name: str) -> dict[str, dict[str, Any]]:
    """Return the decisions whose key begins with the name, by the rest of the key."""
    found = {}
    for entry in journal.entries:
        if entry.type == "decision" and entry.key.startswith(f"decide:{name}"):
            found[entry.key.removeprefix(f"decide:{name}").strip(":").split(":")[0]] = entry.data
    return found


# Aggregation.


@pytest.mark.parametrize("seed", SEEDS)
async def test_each_solution_of_a_round_is_written_from_its_own_predecessor_and_others(seed: int) -> None:
    engine = ScriptedEngine(context=WIDE, order=seed)
    strategy = {"name": "aggregate", "n": 5, "k": 3, "rounds": 2, "template": PROMPT}
    _, journal = await solve(strategy, seed, engine)
    nodes = told(journal)
    written = {node: data for node, data in nodes.items() if data["reason"] != "said"}
    prompts = {request.prompt for request in engine.requests}
    groups = decisions(journal, "group")
    for node, data in nodes.items():
        if data["reason"] == "said":
            shown = groups[node]["shown"]
            texts = [written[name]["text"].strip() for name in shown]
            assert await engine.tokenize(TokenizeRequest("policy", "how?" + "".join(texts))) in prompts
            assert len(shown) <= 3
            assert len({name.count(".") for name in shown}) == 1  # all of one round
            if written[data["parent"]]["text"].strip():
                assert shown[0] == data["parent"]
    depths = Counter(node.count(".") // 2 for node in written)
    assert depths == {0: 5, 1: 5, 2: 5} or any(not data["text"].strip() for data in written.values())


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_newest_answer_of_each_chain_votes(seed: int) -> None:
    strategy = {"name": "aggregate", "n": 5, "k": 2, "rounds": 2, "template": PROMPT}
    for tokens in (None, 200):
        outcome, journal = await solve(strategy, seed, ScriptedEngine(context=WIDE), budget={"tokens": tokens})
        newest: dict[str, str] = {}
        for node, data in sorted(told(journal).items(), key=lambda item: item[0].count(".")):
            if data["answer"] is not None:
                newest[node.split(".")[0]] = data["answer"]
        counts = Counter(newest.values())
        assert counts[outcome.result.answer] == max(counts.values(), default=0)
        assert sum(vote.count for vote in outcome.result.votes) == len(newest)


async def test_earlier_turns_and_the_system_message_stay_and_the_problem_is_in_its_prompt() -> None:
    engine = ScriptedEngine(context=WIDE)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "how?"},
    ]
    strategy = {"name": "aggregate", "n": 2, "k": 2, "rounds": 1, "template": "[{{ problem }}]{{ solutions }}"}
    _, _ = await solve(strategy, 1, engine, problem=None, messages=messages, prompt="Q {problem}")
    beginning = await engine.tokenize(TokenizeRequest("policy", "be briefhelloyes[Q how?]"))
    assert any(request.prompt[: len(beginning)] == beginning for request in engine.requests)


async def test_a_model_brings_its_own_template_and_a_wrong_one_is_refused_by_name() -> None:
    class Noted(ScriptedEngine):
        template = "own {{ problem }} {{ solutions }}"

        async def models(self) -> list[ModelInfo]:
            policy, prm = await super().models()
            policy.extra[NOTE] = {"aggregate": self.template}
            return [policy, prm]

    engine = Noted(context=WIDE)
    await solve({"name": "synthesize", "n": 2}, 3, engine)
    beginning = await engine.tokenize(TokenizeRequest("policy", "own how? "))
    assert any(request.prompt[: len(beginning)] == beginning for request in engine.requests)
    engine.template = "own {{ problem }}"
    with pytest.raises(InvalidRequest, match=r"model 'policy': its 'reasoner_merging'.*does not use {{ solutions }}"):
        await solve({"name": "synthesize", "n": 2}, 3, engine)


def test_a_template_that_hides_the_solutions_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"strategy 'aggregate': template: .*does not use {{ solutions }}"):
        parse_params("aggregate", {"template": "{{ problem }}"})
    with pytest.raises(ValueError, match=r"strategy 'synthesize': template: .*cannot use Call"):
        parse_params("synthesize", {"template": "{{ problem() }} {{ solutions }}"})
    with pytest.raises(ValueError, match=r"n: Input should be greater than or equal to 2"):
        parse_params("aggregate", {"n": 1})


async def test_solutions_that_do_not_fit_are_left_out_and_without_room_the_chains_stay_as_they_are() -> None:
    shown = Counter[int]()
    for seed in range(16):
        for context in (400, 1000):
            engine = ScriptedEngine(context=context)
            strategy = {"name": "aggregate", "n": 4, "k": 4, "rounds": 1, "template": PROMPT}
            outcome, journal = await solve(strategy, seed, engine)
            groups = decisions(journal, "group")
            shown.update(len(data["shown"]) for data in groups.values())
            shown[0] += 4 - len(groups)
            assert all(len(request.prompt) < context for request in engine.requests)
            answers = [data for data in told(journal).values() if data["answer"] is not None]
            assert (outcome.result.answer is None) == (not answers)
    assert min(shown[count] for count in (0, 1, 2, 3)) > 0


# Synthesis.


class Writer(ScriptedEngine):
    """Writes this text wherever it is shown solutions."""

    def __init__(self, text: str) -> None:
        super().__init__(context=WIDE)
        self._text = text

    def _complete(self, request: GenerateRequest, index: int) -> Completion:
        completion = super()._complete(request, index)
        if len(request.prompt) == len("how?"):
            return completion
        return replace(completion, token_ids=(7, EOS), text=self._text, finish_reason="stop", stop=EOS)


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_written_solution_is_the_answer(seed: int) -> None:
    outcome, journal = await solve({"name": "synthesize", "n": 4, "template": PROMPT}, seed, Writer("\\boxed{99}"))
    assert outcome.result.answer == "99"
    [decided] = decisions(journal, "synthesis").values()
    assert outcome.result.node == decided["chosen"]
    assert len(decided["shown"]) >= 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("mode", "text"), [("write", "no idea"), ("select", "Judgment: 9"), ("select", "\\boxed{2}")])
async def test_without_a_usable_text_the_vote_decides(seed: int, mode: str, text: str) -> None:
    strategy = {"name": "synthesize", "n": 4, "mode": mode, "template": PROMPT}
    outcome, journal = await solve(strategy, seed, Writer(text))
    assert [data["chosen"] for data in decisions(journal, "synthesis").values()] == [None]
    first = [data["answer"] for node, data in told(journal).items() if "." not in node and data["answer"] is not None]
    assert Counter(first)[outcome.result.answer] == max(Counter(first).values(), default=0)
    assert sum(vote.count for vote in outcome.result.votes) == len(first)


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_named_solution_wins_and_what_names_it_is_no_candidate(seed: int) -> None:
    strategy = {"name": "synthesize", "n": 4, "mode": "select", "template": PROMPT}
    outcome, journal = await solve(strategy, seed, Writer("2 is wrong. Judgment: 1\\boxed{5}"))
    [decided] = decisions(journal, "synthesis").values()
    assert outcome.result.node == decided["chosen"] == decided["shown"][0]
    assert outcome.result.answer != "5"
    assert all(data["answer"] is None for data in told(journal).values() if data.get("text", "").startswith("2 is"))


def test_the_last_judgment_counts_and_a_number_beyond_the_solutions_names_none() -> None:
    shown = [Node((index,), None, ()) for index in range(3)]
    assert find_named("Judgment: 2", shown) is shown[1]
    assert find_named("**Judgement:** [3]", shown) is shown[2]
    assert find_named("judgment: 1 ... Judgment: 2", shown) is shown[1]
    for text in ("Judgment: 0", "Judgment: 4", "Judgment: 1000", "2", "Judgment: none", ""):
        assert find_named(text, shown) is None
