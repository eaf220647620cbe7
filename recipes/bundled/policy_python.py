"""Train the policy that calls Python on solutions of training problems, from scratch, and export it.

python -m recipes.bundled.policy_python
python -m recipes.bundled.policy_python --export    only export the state that is there
"""

from __future__ import annotations

import json

import torch.nn.functional as F
from torch import Tensor

from recipes.bundled import WORK, model
from recipes.bundled import tokenizer as tok
from recipes.bundled.calls import python_example
from recipes.bundled.data import Batch, Example
from recipes.bundled.train import Plan, export, parse_options, resume, train

SEED = 1
KIND = "policy-python"
PLANS = {KIND: Plan(steps=6000, muon_rate=0.02, adam_rate=0.004)}
LENGTH = 104
"""Mean number of tokens of an example."""


def main() -> None:
    options, plan = parse_options(__doc__, "--kind", PLANS)
    tokenizer = tok.build_python()
    backbone = model.Backbone(model.shape_of(KIND, tokenizer.get_vocab_size()))
    model.initialise(backbone, tok.group_values(tokenizer), SEED)
    folder = WORK / KIND

    def examples(first: int, count: int, _: float) -> list[Example]:
        return [python_example(tokenizer, SEED, index) for index in range(first, first + count)]

    def loss_of(batch: Batch) -> dict[str, Tensor]:
        hidden = backbone(batch.ids).flatten(0, 1)[batch.target_at]
        return {"loss": F.cross_entropy(hidden @ backbone.embedding.T, batch.targets)}

    if options.export:
        resume(folder / "state.safetensors", backbone)
    else:
        cost = train(folder, backbone, plan, examples, loss_of, seed=SEED, average=LENGTH)
        (folder / "cost.json").write_text(json.dumps(cost) + "\n")
    print(f"exported to {export(KIND, backbone)}")


if __name__ == "__main__":
    main()
