"""The commands of the measurement, in order. Each is a command of ``reasoner`` that continues where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.real.tasks import MAX_TOKENS, MODEL_NAME, TASKS, TEMPERATURE
from reasoner.evaluation.calibrate.families import name_families

GSM8K_TOKENS = 200
"""Longest solution of a problem of GSM8K."""
WITHOUT_VERIFIER = ("greedy", "self_consistency", "deepconf")
WITH_VERIFIER = ("best_of_n", "weighted_vote", "beam", "dvts", "mcts", "auto")
CALIBRATION_PROBLEMS = 60
"""Training problems of each task that the table of ``auto`` is fitted on."""


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
    strategies: tuple[str, ...] = ()
    """Those to run instead of all."""
    gsm8k: Path | None = None
    training: int = 200
    """Training problems of each task, whose solutions the probe is fitted on; 0: no probe, and no search."""

    @property
    def probe(self) -> Path:
        """Folder of the probe."""
        return self.out / "probe"

    def steps(self) -> list[Step]:
        """Return the commands in order."""
        steps = [] if self.training == 0 else [*map(self._roll_out, self.tasks), *self._train(), self._calibrate()]
        steps += [self._evaluate(task, get_folder_name(task), MAX_TOKENS) for task in self.tasks]
        if self.gsm8k is not None:
            steps.append(self._evaluate(str(self.gsm8k), "gsm8k", GSM8K_TOKENS))
        return steps

    def _evaluate(self, suite: str, name: str, max_tokens: int) -> Step:
        chosen = self.strategies or WITHOUT_VERIFIER + WITH_VERIFIER * (self.training > 0)
        family = name_families(self.tasks).get(suite)
        strategies = [f"auto:family={family}" if name == "auto" and family is not None else name for name in chosen]
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
        return Step(
            f"evaluate {name}",
            ("eval", suite, *(part for option in options.items() for part in option)),
            self._configure() | ({"REASONER_CALIBRATION": str(self._calibration)} if self.training else {}),
        )

    def _roll_out(self, task: str) -> Step:
        """Return the command that adds the task's labelled solutions to the file of all tasks."""
        options = {
            "--model": f"{MODEL_NAME}={self.model}",
            "--limit": str(self.training),
            "--solutions": "8",
            "--completions": "0",
            "--temperature": str(TEMPERATURE),
            "--max-tokens": str(MAX_TOKENS),
        }
        parts = (part for option in options.items() for part in option)
        return Step(f"solve training problems: {get_folder_name(task)}", ("prm", "rollouts", task, self._data, *parts))

    def _train(self) -> list[Step]:
        if self.probe.exists():
            return []
        arguments = ("prm", "train", self._data, str(self.probe), "--probe", "--labels", "outcome")
        return [Step("fit the probe", (*arguments, "--base", str(self.model)))]

    def _calibrate(self) -> Step:
        arguments = ("calibrate", ",".join(self.tasks), "--model", f"{MODEL_NAME}={self.model}")
        sizes = ("--limit", str(CALIBRATION_PROBLEMS), "--concurrency", "16", "--out", str(self._calibration))
        return Step("calibrate auto on training problems", (*arguments, *sizes), self._configure())

    @property
    def _calibration(self) -> Path:
        return self.out.absolute() / "calibration.json"

    @property
    def _data(self) -> str:
        return str(self.out / "rollouts.jsonl")

    def _configure(self) -> dict[str, str]:
        if self.training == 0:
            return {}
        sampling = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}
        models = {MODEL_NAME: {"verifier": {"kind": "probe"}, "sampling": sampling}}
        return {"REASONER_PROBE": str(self.probe.absolute()), "REASONER_MODELS": json.dumps(models)}


def get_folder_name(task: str) -> str:
    """Return a folder's name for a suite: its task and parameters without shots."""
    name = task.removeprefix("reasoning-gym:").partition("&shots=")[0].partition("?shots=")[0]
    return "".join(char if char.isalnum() or char in "-_=" else "-" for char in name)
