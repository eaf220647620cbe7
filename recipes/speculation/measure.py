"""Measure the tokens per step of this engine with a drafter.

python -m recipes.speculation.measure --target reasoner/bundled/policy --head reasoner/bundled/policy/drafter
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.core.engine_core import EngineCore
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineError, GenerateRequest, SamplingParams
from engine.scheduler.sequence import Event, Request
from engine.speculation.control.controller import DraftOutcome, FixedController, StepCost
from engine.speculation.load import load_drafter
from recipes.speculation.target import Target
from recipes.speculation.texts import SEED, Author, Prompts, Text

GRID = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (8, 8), (3, 8), (5, 16), (5, 32))
"""Maximum depth and maximum number of draft tokens."""


@dataclass(frozen=True, slots=True)
class _Counter(FixedController):
    """A controller that counts accepted draft tokens."""

    accepted: list[int] = field(default_factory=list)

    def update(self, outcomes: Sequence[DraftOutcome], _cost: StepCost, /) -> int:
        self.accepted.extend(len(outcome.accepted) for outcome in outcomes)
        return 0


def kind_of(folder: Path) -> str:
    """Return the kind of the drafter in a folder; one without a kind is a draft model."""
    return str(json.loads((folder / "config.json").read_text()).get("kind", "draft_model"))


def tokens_per_step(
    target: Path, head: Path, texts: Sequence[Text], shape: tuple[int, int], *, greedy: bool, limit: int = 256
) -> float:
    """Return the tokens per step of branches that continue the texts' prompts, at their temperatures or greedily.

    ``shape``: maximum depth and number of draft tokens. ``limit``: maximum number of tokens of a branch.
    """
    core = EngineCore("target", target, EngineOptions(max_running=32))
    counter = _Counter(*shape)
    drafter = load_drafter(f"{kind_of(head)}={head}", target, core.model.decoder, context=core.model.info.context)
    assert drafter is not None
    core.start_speculation(drafter, counter)
    events: list[Event] = []
    for number, text in enumerate(texts):
        in_flight = Request(str(number), events.append)
        branch = Branch(seed=SEED, key=number, max_tokens=min(limit, core.model.info.context - len(text.prompt)))
        sampling = SamplingParams(temperature=0.0 if greedy else text.temperature)
        core.model.add_branches(
            GenerateRequest(str(number), "target", tuple(text.prompt), (branch,), sampling), in_flight
        )
        core.submit(in_flight)
    while core.has_work:
        core.step()
    if errors := [event for event in events if isinstance(event, EngineError)]:
        raise errors[0]
    tokens = sum(len(event.token_ids) for event in events if isinstance(event, Completion))
    return tokens / (tokens - sum(counter.accepted))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, help="as in training")
    parser.add_argument("--texts", type=int, default=120)
    options = parser.parse_args()
    torch.set_num_threads(1)
    author = Author(Target(options.target, "cpu"), limit=1)
    held_out = Prompts(options.prompts, 1.0).held_out(options.texts)
    texts = [Text(author.encode(prompt.text), [], prompt.temperature) for prompt in held_out]
    author.close()
    for shape in GRID:
        found = [tokens_per_step(options.target, options.head, texts, shape, greedy=greedy) for greedy in (True, False)]
        print(f"{shape[0]} deep, {shape[1]} in all: greedy {found[0]:.2f}, sampled {found[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
