"""The commands of the measurement, in order. Each is a command of ``reasoner`` that continues where it was stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.real.tasks import MAX_TOKENS, MODEL_NAME, TASKS, TEMPERATURE

GSM8K_TOKENS = 200
"""Longest solution of a problem of GSM8K."""
WITHOUT_VERIFIER = ("greedy", "self_consistency", "deepconf")
WITH_VERIFIER = ("best_of_n", "weighted_vote", "beam", "dvts", "mcts")


@dataclass(frozen=True, slots=True)
class Step:
    """A command of ``reasoner`` with the environment that it needs beside the usual one."""

    title: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RealPlan:
    """Sizes of the measurement."""

    model: Path
    out: Path
    problems: int = 50
    seeds: int = 3
    ns: str = "1,4,16,64"
    live_ns: str = "4,16"
    tasks: tuple[str, ...] = TASKS
    gsm8k: Path | None = None
    has_verifier: bool = False
    """True if the configuration names a verifier for the model: strategies that need one are measured as well."""

    def steps(self) -> list[Step]:
        """Return the commands in order."""
        steps = [self._evaluate(task, get_folder_name(task), MAX_TOKENS) for task in self.tasks]
        if self.gsm8k is not None:
            steps.append(self._evaluate(str(self.gsm8k), "gsm8k", GSM8K_TOKENS))
        return steps

    def _evaluate(self, suite: str, name: str, max_tokens: int) -> Step:
        strategies = WITHOUT_VERIFIER + WITH_VERIFIER * self.has_verifier
        options = {
            "--model": f"{MODEL_NAME}={self.model}",
            "--strategy": ",".join(strategies),
            "--n": self.ns,
            "--live-n": self.live_ns,
            "--seeds": str(self.seeds),
            "--limit": str(self.problems),
            "--temperature": str(TEMPERATURE),
            "--max-tokens": str(max_tokens),
            "--concurrency": "16",
            "--out": str(self.out / name),
        }
        return Step(f"evaluate {name}", ("eval", suite, *(part for option in options.items() for part in option)))


def get_folder_name(task: str) -> str:
    """Return a folder's name for a suite: its task and parameters without shots."""
    name = task.removeprefix("reasoning-gym:").partition("&shots=")[0].partition("?shots=")[0]
    return "".join(char if char.isalnum() or char in "-_=" else "-" for char in name)
