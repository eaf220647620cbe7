"""Thoughts in texts without tokens: brought solutions and texts of models without delimiters of their own."""

from __future__ import annotations

from typing import Any

import pytest

from engine.protocol.thoughts import DELIMITERS, find_thought, split_thought
from engine.protocol.types import ScoreRequest, ScoreResult
from reasoner.answers.extraction.extract import extract_answer
from reasoner.best_so_far import choose_best_so_far
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import JobOutcome, run_job
from reasoner.tree import Node
from tests.scripted import ScriptedEngine
from tests.specs import build_spec

WORK = "First 3 + 3 = 6, so \\boxed{6}.\n\nNo, wrong."
ANSWER = "It is 3 + 4.\n\nThe answer is \\boxed{7}."


@pytest.mark.parametrize("pair", DELIMITERS)
@pytest.mark.parametrize("lead", ["", "\n \n", "<|im_start|>assistant\n", "\ufeff"])
def test_a_thought_between_delimiters_of_public_models_is_no_answer(pair: tuple[str, str], lead: str) -> None:
    opening, closing = pair
    assert split_thought(f"{lead}{opening}{WORK}{closing}{ANSWER}") == (WORK, ANSWER)
    assert split_thought(f"{WORK}{closing}{ANSWER}")[1] == ANSWER  # the prompt has opened it
    assert split_thought(f"{lead}{opening}{WORK}")[1] == ""
    assert extract_answer(f"{opening}{WORK}{closing}{ANSWER}") == "7"
    assert extract_answer(f"{opening}{WORK}") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f"<think>a <think>b</think> c</think>{ANSWER}", f" c</think>{ANSWER}"),  # the first closing delimiter ends it
        (f"<think>a</think>{ANSWER} A model closes by </think>.", f"{ANSWER} A model closes by </think>."),
        (f"<THINK>{WORK}</Think>{ANSWER}", ANSWER),
        (f"<think>[/THINK] is of others</think>{ANSWER}", ANSWER),
        (f"{ANSWER} `<think>` opens a thought", f"{ANSWER} `<think>` opens a thought"),
        (f"{ANSWER} `</think>` closes a thought", f"{ANSWER} `</think>` closes a thought"),
        (f'{ANSWER} Write "<think>" and "</think>".', f'{ANSWER} Write "<think>" and "</think>".'),
        (f"{ANSWER} <think> is a tag, which </think> closes.", f"{ANSWER} <think> is a tag, which </think> closes."),
        (f"I write `</think>` soon.</think>{ANSWER}", ANSWER),
        (ANSWER, ANSWER),
        ("</think>" + ANSWER, ANSWER),
        ("", ""),
        (
            f"<|channel|>analysis<|message|>{WORK}<|end|><|start|>assistant<|channel|>commentary<|message|>Wait."
            f"<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}",
            ANSWER,
        ),
        (f"<|channel|>analysis<|message|>{WORK}<|end|>\n<|channel|>final<|message|>{ANSWER}", ANSWER),
        (f"<|channel|>final<|message|>{ANSWER}", ANSWER),
    ],
)
def test_the_answer_keeps_the_delimiters_that_it_quotes(text: str, answer: str) -> None:
    assert split_thought(text)[1] == answer


def test_own_delimiters_are_found_beside_those_of_public_models() -> None:
    own = ("<scratch>", "</scratch>")
    assert split_thought(f"<scratch>{WORK}</scratch>{ANSWER}", own) == (WORK, ANSWER)
    assert split_thought(f"<think>{WORK}</think>{ANSWER}", own) == (WORK, ANSWER)
    assert find_thought(f"<scratch>{WORK}</scratch>{ANSWER}") is None


def test_a_text_of_a_model_without_known_delimiters_is_read_alike() -> None:
    root = Node((), None, ())
    node = Node((0,), root, (), f"<think>{WORK}</think>{ANSWER}", reason="stop")
    assert (node.read_text("answer"), node.read_text("thought")) == (ANSWER, WORK)
    assert node.read_text("all") == node.solution


# Select.


class Scoring(ScriptedEngine):
    """Engine that keeps the texts that its reward model is asked about."""

    def __init__(self) -> None:
        super().__init__(context=4096)
        self.read: list[str] = []

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        for item in request.items:
            self.read.append("".join(part for part in item.parts if isinstance(part, str)))
        return await super().score(request)


async def select(
    *candidates: Any, journal: MemoryJournal | None = None, engine: ScriptedEngine | None = None, **fields: Any
) -> JobOutcome:
    body = {"problem": "3 + 4?", "candidates": list(candidates), "seed": 1, "verifier": {"kind": "prm"}} | fields
    spec = build_spec({"strategy": {"name": "select"}} | body)
    return await run_job(spec, engine or Scoring(), journal or MemoryJournal())


@pytest.mark.parametrize("pair", [*DELIMITERS, ("<scratch>", "</scratch>")])
async def test_a_candidates_thought_changes_neither_its_score_nor_its_answer(pair: tuple[str, str]) -> None:
    opening, closing = pair
    fields = {"thoughts": {"open": opening, "close": closing}} if opening == "<scratch>" else {}
    plain = await select(ANSWER, engine=(bare := Scoring()))
    result = (await select(f"{opening}{WORK}{closing}{ANSWER}", engine=(engine := Scoring()), **fields)).result
    assert (result.answer, result.confidence) == ("7", plain.result.confidence)
    assert engine.read == bare.read
    assert (result.thought, result.content) == (WORK, ANSWER)


@pytest.mark.parametrize("reads", ["answer", "thought", "all"])
async def test_a_verifier_reads_the_parts_of_a_candidate_that_the_job_names(reads: str) -> None:
    text = f"<think>{WORK}</think>{ANSWER}"
    expected = {"answer": ANSWER, "thought": WORK, "all": text}[reads]
    verifier = {"kind": "prm", "reads": reads}
    await select(text, engine=(engine := Scoring()), verifier=verifier)
    for step in expected.split("\n\n"):
        assert step in engine.read[0]
    assert (WORK.split("\n\n")[1] in engine.read[0]) == (reads != "answer")
    assert ("\\boxed{7}" in engine.read[0]) == (reads != "thought")


async def test_a_candidate_whose_thought_is_not_closed_has_no_answer_and_no_score() -> None:
    journal = MemoryJournal()
    outcome = await select(f"<think>{WORK}", ANSWER, journal=journal)
    assert [(item.index, item.answer) for item in outcome.result.ranking] == [(1, "7"), (0, None)]
    assert [entry.data["node"] for entry in journal.entries if entry.type == "score"] == ["1"]


async def test_the_thoughts_of_all_messages_of_a_conversation_are_left_out() -> None:
    messages = [
        {"role": "user", "content": "3 + 4?"},
        {"role": "assistant", "content": f"<think>{WORK}</think>Is it a sum?"},
        {"role": "user", "content": "What does <think>this</think> mean?"},
        {"role": "assistant", "content": f"<think>{WORK}</think>{ANSWER}"},
    ]
    result = (await select(messages, engine=(engine := Scoring()))).result
    assert result.answer == "7"
    assert "No, wrong" not in engine.read[0]
    assert "Is it a sum?" in engine.read[0]
    assert "<think>this</think>" in engine.read[0]


@pytest.mark.parametrize("by", ["majority", "verifier", "weighted", "tournament"])
async def test_a_replay_reads_the_same_thoughts(by: str) -> None:
    fields: dict[str, Any] = {"strategy": {"name": "select", "by": by}}
    if by == "tournament":
        fields["verifier"] = {"kind": "pairwise", "max_tokens": 0}
    journal = MemoryJournal()
    texts = [
        f"[THINK]{WORK}[/THINK]{ANSWER}",
        f"<seed:think>{WORK}</seed:think>\\boxed{{8}}",
        "<thinking>open \\boxed{9}",
    ]
    first = await select(*texts, journal=journal, **fields)
    again = await select(*texts, journal=MemoryJournal(journal.entries), **fields)
    assert again.result == first.result
    assert {item.index: item.answer for item in first.result.ranking} == {0: "7", 1: "8", 2: None}
    spec = build_spec({"problem": "3 + 4?", "candidates": texts, "seed": 1} | fields)
    best = choose_best_so_far(spec, journal.entries)
    assert best is not None
    assert best.answer in ("7", "8")
