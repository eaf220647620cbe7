"""Train a policy on solutions of training problems and export it; the large one and the one that thinks grow from it.

python -m recipes.bundled.policy --kind policy          (or policy-large, policy-thinking, draft)
python -m recipes.bundled.policy --kind policy --export    only export the state that is there
"""

from __future__ import annotations

import json
import random

import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from recipes.bundled import SHIPPED, WORK, model
from recipes.bundled import tokenizer as tok
from recipes.bundled.data import Batch, Example, policy_example
from recipes.bundled.relabel import OwnThoughts
from recipes.bundled.thoughts import thinking_example
from recipes.bundled.train import Plan, export, parse_options, resume, train

SEED = 1
OWN_SHARE = 0.5
"""Share of the thinking policy's own thoughts among its examples, once there are some (``relabel``)."""
PLANS = {
    "policy": Plan(steps=2070),
    "policy-large": Plan(steps=2000, muon_rate=0.006, adam_rate=0.001),
    "policy-thinking": Plan(steps=9000, muon_rate=0.012, adam_rate=0.003, batches=4),
    "draft": Plan(steps=2500, adam_rate=0.006),
}


def numbers(tokenizer: Tokenizer) -> dict[int, int]:
    """Return the number of each token id that is a whole number."""
    return {tok.token_id(tokenizer, str(number)): number for number in tok.NUMBERS}


def fresh(kind: str, tokenizer: Tokenizer) -> model.Backbone:
    backbone = model.Backbone(model.shape_of(kind, tokenizer.get_vocab_size()))
    model.initialise(backbone, numbers(tokenizer), SEED)
    if kind in ("policy-large", "policy-thinking"):
        small, _ = model.load(SHIPPED / "policy")
        model.grow(small, backbone)
    return backbone


def main() -> None:
    options, plan = parse_options(__doc__, "--kind", PLANS)
    thinks = options.kind == "policy-thinking"
    tokenizer = tok.build_thinking() if thinks else tok.load()
    backbone = fresh(options.kind, tokenizer)
    folder = WORK / options.kind

    seed = SEED + (options.kind == "policy-large")  # the small policy was trained on the other seed's examples

    own = OwnThoughts(tokenizer)

    def examples(first: int, count: int, _: float) -> list[Example]:
        indices = range(first, first + count)
        if not thinks:
            return [policy_example(tokenizer, seed, index) for index in indices]
        own.refresh()
        return [sample_thinking(index) for index in indices]

    def sample_thinking(index: int) -> Example:
        rng = random.Random(f"mix/{seed}/{index}")
        example = own.example(rng) if rng.random() < OWN_SHARE else None
        return example or thinking_example(tokenizer, seed, index)

    def loss_of(batch: Batch) -> dict[str, Tensor]:
        hidden = backbone(batch.ids).flatten(0, 1)[batch.target_at]
        logs = F.log_softmax(hidden @ backbone.embedding.T, -1)
        return {"loss": -(logs[batch.share_of, batch.share_token] * batch.shares).sum() / len(batch.targets)}

    if options.export:
        resume(folder / "state.safetensors", backbone)
    else:
        cost = train(folder, backbone, plan, examples, loss_of, seed=SEED, average=250 if thinks else 72)
        (folder / "cost.json").write_text(json.dumps(cost) + "\n")
    print(f"exported to {export(options.kind, backbone)}")


if __name__ == "__main__":
    main()
