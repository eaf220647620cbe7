"""Medusa drafter: heads that predict the next tokens all at once from one hidden state.

Cai et al. 2024, https://arxiv.org/abs/2401.10774.

Head ``k`` (from 0) reads the final hidden state ``h`` of the last computed token and the embedding ``e`` of the token
sampled from it, and predicts the token ``k + 1`` positions after that one. In the paper the heads read ``h`` alone; the
sampled token, which is not determined by ``h``, costs one more column block of the same product. With ``n = h /
rms(h)`` and a gated hidden layer ``a = silu(G [n; e]) * U [n; e]`` that all heads share, the head's own state is ``n +
V_k a + b_k``, and the target's own head computes its logits. So all drafts cost two products and the logits, and the
shared layer can be much wider than the paper's one for each head.

The heads are independent of each other: a tree is every combination of their candidates, and the likeliest combinations
are verified.

From the target it needs final hidden states, the embedding table and the head, which must normalise its input, as the
Llama family's does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.layer import HeadShape
from engine.cache.paged_kv import KVCache
from engine.device import to_device
from engine.models.decoder import Decoder
from engine.models.interface import Model
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.drafter import DraftRequest, HiddenStateNeeds, StepResult
from engine.speculation.drafters.head_config import LastStates, read_head_config
from engine.speculation.drafters.tree_draft import combine_positions
from engine.weights.safetensors import Weights
from kernels.cpu.availability import can_use_kernels
from kernels.cpu.runtime.kernel_graph import KernelGraphCache
from kernels.layers.activation import silu_mul
from kernels.layers.norm import rms_norm
from kernels.linear.fp32 import Linear

_EPS = 1e-6
_MAX_RECORDED_BRANCHES = 16
"""Maximum number of branches of a recorded draft."""


def load_medusa(folder: Path, model: Model) -> MedusaDrafter:
    """Load the heads in ``folder`` (``config.json``, ``model.safetensors``) for a target.

    Raises ``EngineError`` that names what is missing, damaged, left over, or does not fit the target.
    """
    fields = read_head_config(folder, "medusa", model, ("heads", "intermediate_size"))
    hidden, heads, inner = model.config.hidden_size, int(fields["heads"]), int(fields["intermediate_size"])
    weights = Weights(folder)
    trunk = torch.cat([weights.take(f"trunk.{name}_proj.weight", inner, 2 * hidden) for name in ("gate", "up")])
    blocks, bias = weights.take("heads.weight", heads * hidden, inner), weights.take("heads.bias", heads * hidden)
    weights.finish()
    put = model.device_config.convert
    return MedusaDrafter(Linear(put(trunk)), Linear(put(blocks), put(bias)), heads, model)


class MedusaDrafter:
    """A ``Drafter`` with the last hidden state of each branch; a branch just preempted or resumed has none."""

    kind = "medusa"
    key_shapes: tuple[HeadShape, ...] = ()
    hidden_state_needs = HiddenStateNeeds.LAST
    observed_layers: tuple[int, ...] = ()

    def __init__(self, trunk: Linear, blocks: Linear, heads: int, model: Model) -> None:
        """``trunk``: product with the gate and the other half of the hidden layer; ``blocks``: product from it to the
        heads' states."""
        self._trunk, self._blocks, self._heads, self._model = trunk, blocks, heads, model
        self._device_config = model.device_config
        self._ones = self._device_config.convert(torch.ones(model.config.hidden_size))
        has_kernels = trunk.is_kernel and blocks.is_kernel
        self._is_recordable = has_kernels and isinstance(model, Decoder) and model.is_head_recordable
        self._inputs = torch.empty(2, _MAX_RECORDED_BRANCHES, model.config.hidden_size)
        """Hidden states and embedded tokens that recorded kernels read."""
        self._graphs: KernelGraphCache[Tensor] = KernelGraphCache()

    def reset(self, cache: KVCache) -> None:
        self._last = LastStates(cache, self._model.config.hidden_size, self._device_config)

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        if steps:
            self._last.put(steps, hidden, [step.rows[-1] for step in steps])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found, states = self._last.get(requests)
        drafts = [EMPTY_DRAFT] * len(requests)
        if not found:
            return drafts
        known_requests = [requests[index] for index in found]
        depth = min(self._heads, max(request.depth for request in known_requests))
        logits = self._predict_logits(known_requests, states, depth)
        for index, draft in zip(found, combine_positions(known_requests, logits, depth), strict=True):
            drafts[index] = draft
        return drafts

    def release(self, sequence: GenerateSequence) -> None:
        """Do nothing: the branch's state is replaced with its row of the page table."""

    def warm_ups(self) -> list[Callable[[], None]]:
        """Return nothing: no draft is captured."""
        return []

    def clear_cache(self) -> None:
        """Do nothing: there are no keys and values."""

    def _predict_logits(self, requests: Sequence[DraftRequest], states: Tensor, depth: int) -> Tensor:
        """Return logits ``[requests * depth, vocab]``, request by request."""
        count, sampled = len(requests), [request.sequence.tokens[-1] for request in requests]
        embedded = self._model.embed(to_device(torch.tensor(sampled), self._device_config.device))
        if not self._is_recordable or count > _MAX_RECORDED_BRANCHES:
            return self._compute_logits(states, embedded, depth)
        inputs = self._inputs[:, :count]
        filled = inputs.numpy()
        filled[0], filled[1] = states.numpy(), embedded.numpy()
        return self._graphs(
            (count, depth, torch.get_num_threads()), lambda: self._compute_logits(inputs[0], inputs[1], depth)
        )

    def _compute_logits(self, states: Tensor, sampled: Tensor, depth: int) -> Tensor:
        """Return the logits of the ``depth`` tokens after those ``sampled`` from ``states`` ``[count, hidden]``."""
        hidden = states.shape[1]
        if can_use_kernels(states):
            from kernels.cpu.sampling.draft_heads import add_to_blocks, concat_normalized

            both = concat_normalized(states, sampled, _EPS)
            blocks = self._blocks(silu_mul(self._trunk(both))).view(-1, self._heads, hidden)
            return self._model.compute_logits(add_to_blocks(both, blocks, depth))
        normal = rms_norm(states, self._ones, _EPS)
        blocks = self._blocks(silu_mul(self._trunk(torch.cat((normal, sampled), dim=1)))).view(-1, self._heads, hidden)
        return self._model.compute_logits((blocks[:, :depth] + normal[:, None]).flatten(0, 1))
