"""The training loop that all bundled models share: seeded batches, a schedule, checkpoints, a progress bar.

A run is a folder ``work/<name>``: ``state.safetensors`` (weights, optimizer, and in its metadata the step, seconds and
tokens) is replaced about once a minute, and running the same command again goes on from there. ``log.jsonl`` has one
line per report.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.bundled import SHIPPED
from recipes.bundled import model as models
from recipes.bundled import tokenizer as tok
from recipes.bundled.data import Batch, Example, bucketed
from recipes.bundled.optim import Optimizer

POOL = 24
"""Number of batches that are sampled together, sorted by length and shuffled."""
BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to train and how the learning rate moves; a run ends at ``steps`` or ``minutes``, whichever is first."""

    steps: int
    minutes: float = float("inf")
    warmup: int = 60
    decay_from: float = 0.5
    """The share of the run after which the rates fall linearly to zero; 1 keeps them constant."""
    muon_rate: float = 0.02
    adam_rate: float = 0.004
    batches: int = 2
    """Number of batches of a step."""

    def progress(self, step: int, seconds: float) -> float:
        return min(1.0, max(step / self.steps, seconds / 60 / self.minutes))

    def scale(self, step: int, progress: float) -> float:
        falling = 1.0 if self.decay_from >= 1 else min(1.0, (1 - progress) / (1 - self.decay_from))
        return min(1.0, (step + 1) / self.warmup) * max(falling, 0.0)


def parse_options(description: str | None, option: str, plans: Mapping[str, Plan]) -> tuple[argparse.Namespace, Plan]:
    """Parse the command line, set the number of threads, and return the options and the plan that ``option`` names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(option, choices=list(plans), default=next(iter(plans)))
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="training time at most")
    parser.add_argument("--export", action="store_true", help="export the last state without training")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plan = plans[getattr(options, option.removeprefix("--"))]
    return options, replace(plan, steps=options.steps or plan.steps, minutes=options.minutes)


def train(
    folder: Path,
    model: nn.Module,
    plan: Plan,
    examples: Callable[[int, int, float], list[Example]],
    loss_of: Callable[[Batch], dict[str, Tensor]],
    *,
    seed: int,
    average: int = 72,
) -> dict[str, float]:
    """Train until the plan ends; returns steps, seconds and tokens.

    ``examples(first, count, progress)`` draws examples by index; ``loss_of`` gives the parts of the loss, which are
    added up. Tokens count every input position without padding; an example has about ``average`` of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = Optimizer(model.named_parameters(), muon_rate=plan.muon_rate, adam_rate=plan.adam_rate)
    step, drawn, seconds, tokens = resume(folder / "state.safetensors", model, optimizer)
    saved = reported = time.monotonic()
    running: dict[str, float] = {}
    queue: Iterator[Batch] = iter(())
    model.train()
    columns = (TextColumn(folder.name), BarColumn(), TextColumn("{task.percentage:.0f}% {task.fields[note]}"))
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(folder.name, total=1.0, note="")
        while (progress := plan.progress(step, seconds)) < 1:
            started = time.monotonic()
            losses: dict[str, float] = {}
            for _ in range(plan.batches):
                batch = next(queue, None)
                if batch is None:
                    wanted = POOL * BATCH_TOKENS // average
                    pool = examples(drawn, wanted, progress)
                    drawn += wanted
                    queue = bucketed(pool, BATCH_TOKENS, random.Random(f"{seed}/{drawn}"))
                    batch = next(queue)
                parts = loss_of(batch)
                torch.stack(list(parts.values())).sum().backward()  # type: ignore[no-untyped-call]
                tokens += int((batch.ids != 0).sum())
                for name, part in parts.items():
                    losses[name] = losses.get(name, 0.0) + float(part.detach()) / plan.batches
            optimizer.step(plan.scale(step, progress))
            step += 1
            now = time.monotonic()
            seconds += now - started
            running = {name: 0.98 * running.get(name, loss) + 0.02 * loss for name, loss in losses.items()}
            bar.update(task, completed=progress, note=" ".join(f"{name} {loss:.3f}" for name, loss in running.items()))
            if now - reported > 20:
                reported = now
                line = {"step": step, "seconds": round(seconds), "tokens": tokens, "rate": round(tokens / seconds)}
                with (folder / "log.jsonl").open("a") as log:
                    log.write(json.dumps(line | {name: round(loss, 4) for name, loss in running.items()}) + "\n")
            if now - saved > 60:
                saved = now
                save(folder / "state.safetensors", model, optimizer, (step, drawn, seconds, tokens))
    save(folder / "state.safetensors", model, optimizer, (step, drawn, seconds, tokens))
    model.eval()
    return {"steps": step, "seconds": round(seconds), "tokens": tokens}


def export(
    name: str,
    backbone: models.Backbone,
    score: tuple[Tensor, Tensor] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Path:
    """Write the shipped folder of a model, without its model card; ``notes`` are for its config.json."""
    folder = SHIPPED / name
    folder.mkdir(parents=True, exist_ok=True)
    if name == "policy-thinking":
        tok.save(folder, tok.build_thinking(), tok.THINKING_TEMPLATE, backbone.shape.positions)
    elif name == "policy-python":
        tok.save(folder, tok.build_python(), longest=backbone.shape.positions)
    elif name == "checker":
        tok.save(folder, tok.build_checker(), longest=backbone.shape.positions)
    else:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tok.FOLDER / file, folder / file)
    models.export(backbone, folder, score=score, notes=notes)
    return folder


def save(path: Path, model: nn.Module, optimizer: Optimizer, counters: tuple[int, int, float, int]) -> None:
    """Write the state to a temporary file, then rename it over the old one."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()} | optimizer.state()
    new = path.with_suffix(".new")
    save_file({name: t.contiguous() for name, t in tensors.items()}, new, {"counters": json.dumps(counters)})
    os.replace(new, path)


def resume(path: Path, model: nn.Module, optimizer: Optimizer | None = None) -> tuple[int, int, float, int]:
    """Load a state into the model (and the optimizer); zeros when there is none."""
    if not path.exists():
        return 0, 0, 0.0, 0
    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        step, drawn, seconds, tokens = json.loads(file.metadata()["counters"])
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(state[f"model.{name}"])
    if optimizer is not None:
        optimizer.restore(state)
    return step, drawn, seconds, tokens
