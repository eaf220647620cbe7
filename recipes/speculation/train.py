"""Train a drafter for a target on texts that it generates itself, and export it with a model card.

    P=reasoner/bundled/policy; python -m recipes.speculation.train --target $P --kind eagle --out $P/drafter

The same command trains for a large model on a GPU:

    python -m recipes.speculation.train --target MODEL --kind eagle --out HEADS --prompts prompts.txt --device cuda

A file of prompts has one per line. An interrupted run resumes: the texts and the state of the training are kept in
``--work``.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from recipes.bundled import SHIPPED
from recipes.bundled.optim import Optimizer
from recipes.bundled.train import Plan, resume, save
from recipes.speculation import WORK
from recipes.speculation.kinds import HEADS, Head
from recipes.speculation.objective import Batch, collate, levels
from recipes.speculation.report import write_card
from recipes.speculation.small import KIND, Small
from recipes.speculation.target import Target
from recipes.speculation.texts import SEED, Author, Prompts, Text

KINDS = (KIND, *sorted(HEADS))
BATCH_TOKENS = 1536
POOL = 32
"""Number of batches whose texts are sampled together and sorted by length."""
HELD_OUT = 120
"""Number of texts for evaluation."""
LATER = 0.85
"""Weight of a level's loss relative to the level before, as its tokens count only if the earlier ones are accepted."""


def batches(texts: Sequence[Text], device: str, first: int) -> Iterator[Batch]:
    """Yield batches of texts of similar length in random order, from number ``first`` on, without end."""
    number, epoch = 0, 0
    while True:
        rng = random.Random(f"{SEED}/{epoch}")
        order = rng.sample(range(len(texts)), len(texts))
        epoch += 1
        for group in _grouped(texts, order, rng):
            if number >= first:
                yield collate([texts[index] for index in group], device)
            number += 1


def train(
    head: Head | Small, target: Target, texts: Sequence[Text], plan: Plan, folder: Path
) -> dict[str, float | int]:
    """Train until the plan ends; return the costs of the training."""
    folder.mkdir(parents=True, exist_ok=True)
    named = (
        (f"layers.{name}" if p.ndim == 2 and "embedding" not in name else name, p)
        for name, p in head.named_parameters()
    )
    optimizer = Optimizer(named, muon_rate=plan.muon_rate, adam_rate=plan.adam_rate)
    path = folder / "state.safetensors"
    step, _, seconds, tokens = resume(path, head, optimizer)
    saved, running = time.monotonic(), 0.0
    columns = (TextColumn(folder.name), BarColumn(), TextColumn("{task.percentage:.0f}% loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(folder.name, total=1.0, loss=0.0)
        queue = batches(texts, target.device, step)
        while (progress := plan.progress(step, seconds)) < 1:
            started, batch = time.monotonic(), next(queue)
            with torch.autocast(target.device, torch.bfloat16, enabled=target.device != "cpu"):
                losses = torch.stack([level.loss for level in levels(head, target, batch)])
            weights = LATER ** torch.arange(len(losses), device=losses.device)
            (losses @ weights).backward()  # type: ignore[no-untyped-call]
            optimizer.step(plan.scale(step, progress))
            step, tokens = step + 1, tokens + int((batch.end - batch.start).sum())
            now = time.monotonic()
            seconds += now - started
            mean = float(losses.detach().mean())
            running = mean if running == 0 else 0.98 * running + 0.02 * mean
            bar.update(task, completed=progress, loss=running)
            if now - saved > 60:
                saved = now
                save(path, head, optimizer, (step, step, seconds, tokens))
    save(path, head, optimizer, (step, step, seconds, tokens))
    return {"steps": step, "seconds": round(seconds), "tokens": tokens}


def _grouped(texts: Sequence[Text], order: Sequence[int], rng: random.Random) -> Iterator[list[int]]:
    """Yield the indices of all texts once, in groups of at most about ``BATCH_TOKENS`` tokens."""
    average = sum(len(text.prompt) + len(text.tokens) for text in texts) / len(texts)
    pool = max(1, int(POOL * BATCH_TOKENS / average))
    for start in range(0, len(order), pool):
        sized = [(len(texts[index].prompt) + len(texts[index].tokens), index) for index in order[start : start + pool]]
        groups: list[list[int]] = [[]]
        for length, index in sorted(sized):
            if groups[-1] and (len(groups[-1]) + 1) * length > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(index)
        yield from rng.sample(groups, len(groups))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the model that drafts are for")
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the heads")
    parser.add_argument("--prompts", type=Path, help="a file with a prompt on each line; else the suites' problems")
    parser.add_argument("--temperature", type=float, default=1.0, help="of texts from a file of prompts")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of the texts to learn from")
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens of one text")
    parser.add_argument(
        "--levels", type=int, default=5, help="heads of medusa; draft tokens that eagle and eagle3 are trained for"
    )
    parser.add_argument("--layers", type=int, default=2, help="of a draft model")
    parser.add_argument("--start", type=Path, default=SHIPPED / "draft", help="the model that a draft model grows from")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="training time at most")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, help="folder for texts and states; by default one for each target")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    target = Target(options.target, options.device)
    work = options.work or WORK / options.target.name
    prompts = Prompts(options.prompts, options.temperature)
    author = Author(target, options.max_tokens)
    texts = author.training(prompts, options.tokens, work / "texts")
    held_out = author.write(prompts.held_out(HELD_OUT), SEED - 1)
    author.close()
    small = options.kind == KIND
    head = Small(target, options.start, options.layers) if small else HEADS[options.kind](target, options.levels)
    head.to(options.device)
    # A lower rate keeps more of the initial model.
    rate = 0.01 if small else 0.02
    plan = Plan(steps=options.steps, minutes=options.minutes, decay_from=0.4, muon_rate=rate, adam_rate=0.003)
    cost = train(head, target, texts, plan, work / options.kind)
    head.save(options.out, target)
    write_card(options.out, head, target, held_out, cost)
    print(f"exported to {options.out}")


if __name__ == "__main__":
    main()
