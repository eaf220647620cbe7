"""The trial of reasoning-gym's tasks: what it says of tasks that run, are slow, end or score their answers as wrong."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from benchmarks.gym.__main__ import run_task, write_table


@dataclasses.dataclass
class Config:
    seed: int = 0
    size: int = 0


class Task:
    """A task that does what its name says."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.name == "slow":
            threading.Event().wait()
        if self.name == "dies":
            os._exit(3)
        if self.name == "broken":
            raise RuntimeError("needs a dictionary")
        return {"question": f"{index}?", "answer": None if self.name == "silent" else str(index), "metadata": {}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float(answer == entry["answer"])


@pytest.fixture(autouse=True)
def _replace_package(monkeypatch: pytest.MonkeyPatch) -> None:
    module, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    module.__dict__["create_dataset"] = lambda task, **params: Task(task)
    names = ("good", "slow", "dies", "broken", "silent")
    factory.__dict__["DATASETS"] = dict.fromkeys(names, (Task, Config))
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


def test_a_task_that_does_not_end_or_dies_is_named_and_the_others_go_on() -> None:
    good, silent = run_task("good", 3, 60.0), run_task("silent", 3, 60.0)
    assert (good["problems"], good["stated"], good["right"]) == (3, 3, 3)
    assert (silent["problems"], silent["stated"], silent["right"]) == (3, 0, 0)
    rows = [good, run_task("slow", 3, 0.5), run_task("dies", 3, 60.0), run_task("broken", 3, 60.0), silent]
    text = write_table(rows, 3, 60.0)
    assert "1 of 5 tasks make 3 problems" in text
    assert "| `dies` |  |  |  | its process ended with 3 |" in text
    assert "| `slow` |  |  |  | takes longer than 0 seconds |" in text
    assert "needs a dictionary" in text
    assert "| `silent` | 3 | 0 | 0 |  |" in text
