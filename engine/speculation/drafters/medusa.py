"""Medusa: heads that guess the next tokens all at once from one hidden state (Cai et al. 2024,
https://arxiv.org/abs/2401.10774).

Head ``k`` (from 0) reads the final hidden state ``h`` of the last computed token and the embedding ``e`` of the token
that was drawn from it, and guesses the token ``k + 1`` places after that one. In the paper the heads read ``h`` alone;
the drawn token, which ``h`` cannot know when it was sampled, costs one more column block of the same product. With
``n = h / rms(h)`` and a gated hidden layer ``a = silu(G [n; e]) * U [n; e]``, which all heads share, the head's own
state is ``n + V_k a + b_k``, and the target's own head reads it. So all guesses cost two products and a read-out, and
the shared layer can be much wider than the paper's one for each head.

The heads guess independently of each other: a tree is every combination of their candidates, and the most likely
combinations are computed.

What it needs of the target: final hidden states, the embedding table and the head (``Model.embed``,
``Model.compute_logits``), which must normalise what it reads, as the Llama family's does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.models.decoder import Decoder
from engine.models.interface import Model
from engine.sampling.truncation import Ints
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.drafter import DraftRequest, HiddenStateNeeds, StepResult
from engine.speculation.drafters.head_config import Floats32, LastStates, read_head_config
from engine.speculation.drafters.proposal import DraftSampler
from engine.weights.safetensors import Weights
from kernels.cpu.availability import can_use_kernels
from kernels.cpu.runtime.kernel_graph import KernelGraphCache
from kernels.layers.activation import silu_mul
from kernels.layers.norm import rms_norm
from kernels.linear.fp32 import Linear

_EPS = 1e-6
_WIDTH = 6
"""Candidates of each head for a tree."""
_MOST = 16
"""Branches whose guesses are computed from a tape."""


def load_medusa(folder: Path, model: Model) -> MedusaDrafter:
    """The heads in ``folder`` (``config.json``, ``model.safetensors``) for a target.

    Raises ``EngineError`` that names what is missing, damaged, left over, or does not fit the target.
    """
    fields = read_head_config(folder, "medusa", model, ("heads", "intermediate_size"))
    hidden, heads, inner = model.config.hidden_size, int(fields["heads"]), int(fields["intermediate_size"])
    weights = Weights(folder)
    trunk = torch.cat([weights.take(f"trunk.{name}_proj.weight", inner, 2 * hidden) for name in ("gate", "up")])
    blocks = weights.take("heads.weight", heads * hidden, inner), weights.take("heads.bias", heads * hidden)
    weights.finish()
    put = model.device_config.convert
    return MedusaDrafter(Linear(put(trunk)), Linear(*map(put, blocks)), heads, model)


class MedusaDrafter:
    """A ``Drafter`` that knows one hidden state of each branch; none of a branch that was just preempted or resumed."""

    kind = "medusa"
    layers = 0
    hidden_state_needs = HiddenStateNeeds.LAST

    def __init__(self, trunk: Linear, blocks: Linear, heads: int, model: Model) -> None:
        """``trunk``: the product with the gate and the other half of the hidden layer, ``blocks``: that with what turns
        it into the heads' states."""
        self._trunk, self._blocks, self._heads, self._model = trunk, blocks, heads, model
        self._device_config = model.device_config
        self._ones = self._device_config.convert(torch.ones(model.config.hidden_size))
        self._table: Floats32 | None = None
        """The embedding table where tapes can be made."""
        if isinstance(model, Decoder) and model.is_head_recordable and trunk.is_kernel and blocks.is_kernel:
            self._table = model.embedding.numpy()
        self._inputs = torch.empty(2, _MOST, model.config.hidden_size)
        """States and embedded tokens, where tapes read them."""
        self._tapes: KernelGraphCache[Tensor] = KernelGraphCache()

    def reset(self, cache: KVCache) -> None:
        """See ``Drafter``."""
        self._last = LastStates(cache, self._model.config.hidden_size)

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        """See ``Drafter``."""
        if steps:
            self._last.put(steps, hidden, [step.rows[-1] for step in steps])

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        """See ``Drafter``."""
        found, states = self._last.of(wishes)
        drafts = [EMPTY_DRAFT] * len(wishes)
        if not found:
            return drafts
        asked = [wishes[index] for index in found]
        depth = min(self._heads, max(wish.depth for wish in asked))
        width = _WIDTH if any(wish.nodes > wish.depth for wish in asked) else 1
        guesses = DraftSampler([wish.sequence for wish in asked])
        tokens, chances = guesses.best(self._logits(asked, states, depth), *_places(len(asked), depth), width)
        shape = (len(asked), depth, -1)
        rows = zip(found, asked, tokens.reshape(shape).tolist(), chances.reshape(shape).tolist(), strict=True)
        for index, wish, some, odds in rows:
            drafts[index] = _combine(some[: wish.depth], odds, wish)
        return drafts

    def release(self, sequence: GenerateSequence) -> None:
        """See ``Drafter``. What is known of a branch goes with its row of the cache."""

    def clear_cache(self) -> None:
        """See ``Drafter``. There are none."""

    def _logits(self, wishes: Sequence[DraftRequest], states: Floats32, depth: int) -> Tensor:
        """``[wishes * depth, vocab]``, wish by wish."""
        count, drawn = len(wishes), [wish.sequence.tokens[-1] for wish in wishes]
        if self._table is None or count > _MOST:
            return self._guess(
                self._device_config.convert(torch.from_numpy(states)), self._model.embed(torch.tensor(drawn)), depth
            )
        inputs = self._inputs[:, :count]
        filled = inputs.numpy()
        filled[0], filled[1] = states, self._table[drawn]
        return self._tapes((count, depth, torch.get_num_threads()), lambda: self._guess(inputs[0], inputs[1], depth))

    def _guess(self, states: Tensor, drawn: Tensor, depth: int) -> Tensor:
        """The logits for ``depth`` tokens after the ones that were ``drawn`` from ``states``, ``[count, hidden]``."""
        hidden = states.shape[1]
        if can_use_kernels(states):
            from kernels.cpu.sampling.draft_heads import add_to_blocks, concat_normalized

            both = concat_normalized(states, drawn, _EPS)
            blocks = self._blocks(silu_mul(self._trunk(both))).view(-1, self._heads, hidden)
            return self._model.compute_logits(add_to_blocks(both, blocks, depth))
        normal = rms_norm(states, self._ones, _EPS)
        blocks = self._blocks(silu_mul(self._trunk(torch.cat((normal, drawn), dim=1)))).view(-1, self._heads, hidden)
        return self._model.compute_logits((blocks[:, :depth] + normal[:, None]).flatten(0, 1))


@lru_cache(64)
def _places(count: int, depth: int) -> tuple[Ints, Ints]:
    """Of each row of logits its branch, and how many guesses lie before its."""
    return np.arange(count).repeat(depth), np.tile(np.arange(depth), count)


def _combine(tokens: list[list[int]], chances: list[list[float]], wish: DraftRequest) -> Draft:
    """The likeliest combinations of each depth's candidates, which come the best first."""
    if wish.nodes == wish.depth:
        return Draft.chain([some[0] for some in tokens], [odds[0] for odds in chances[: len(tokens)]])
    places: list[tuple[int, int, int]] = []
    """Of each guess its parent, its depth and its rank among the candidates."""
    worth = [(-chances[0][0], -1, 0, 0)]
    while worth and len(places) < wish.nodes:
        minus, parent, depth, rank = heapq.heappop(worth)
        if minus == 0:
            break
        if rank + 1 < len(tokens[depth]):
            heapq.heappush(worth, (minus / chances[depth][rank] * chances[depth][rank + 1], parent, depth, rank + 1))
        if depth + 1 < len(tokens):
            heapq.heappush(worth, (minus * chances[depth + 1][0], len(places), depth + 1, 0))
        places.append((parent, depth, rank))
    return Draft(
        tuple(tokens[depth][rank] for _, depth, rank in places),
        tuple(parent for parent, _, _ in places),
        tuple(chances[depth][rank] for _, depth, rank in places),
    )
