"""Lock-step generation and scoring in large batches, for making data and for the recipe's own measurements.

Prompts of equal length run together with a plain key-value cache, so nothing is padded or masked. This is not the
engine: it is small, needs no service, and serves as an independent check of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.bundled.model import Backbone

ROWS = 768


@torch.inference_mode()
def generate(
    model: Backbone,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    stop: Collection[int],
    limit: int = 96,
    random: torch.Generator,
) -> list[list[int]]:
    """Return the tokens after each prompt, up to and including the first stop token; temperature 0 is greedy."""
    results: list[list[int]] = [[] for _ in prompts]
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    for length in sorted(by_length):
        members = by_length[length]
        for start in range(0, len(members), ROWS):
            chunk = members[start : start + ROWS]
            batch = torch.tensor([list(prompts[index]) for index in chunk])
            produced = _run(model, batch, temperature, set(stop), limit, random)
            for index, tokens in zip(chunk, produced, strict=True):
                results[index] = tokens
    return results


def _run(
    model: Backbone, ids: Tensor, temperature: float, stop: set[int], limit: int, random: torch.Generator
) -> list[list[int]]:
    shape = model.shape
    rows, length = ids.shape
    limit = min(limit, len(model.cos) - length)
    size = (shape.layers, rows, shape.kv_heads, length + limit, shape.head_width)
    keys, values = torch.empty(size), torch.empty(size)
    produced: list[list[int]] = [[] for _ in range(rows)]
    alive = torch.arange(rows)
    ends = torch.zeros(shape.vocabulary, dtype=torch.bool)
    ends[list(stop)] = True
    finished = torch.zeros(rows, dtype=torch.bool)
    past, new = 0, ids
    for step in range(limit):
        hidden = _forward(model, new, keys, values, past)
        past += new.shape[1]
        logits = hidden[:, -1] @ model.embedding.T
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            noise = torch.rand(logits.shape, generator=random).clamp_(min=1e-20)
            token = (logits / temperature - (-noise.log()).log()).argmax(-1)
        for row, (index, value) in enumerate(zip(alive.tolist(), token.tolist(), strict=True)):
            if not finished[row]:
                produced[index].append(value)
        finished |= ends[token]
        if finished.all():
            break
        new = token[:, None]
        if finished.float().mean() > 0.25 or (step == limit - 1):
            stay = (~finished).nonzero().flatten()
            keys, values = keys[:, stay], values[:, stay]
            alive, new, finished = alive[stay], new[stay], finished[stay]
    return produced


def _forward(model: Backbone, ids: Tensor, keys: Tensor, values: Tensor, past: int) -> Tensor:
    x = F.embedding(ids, model.embedding)
    end = past + ids.shape[1]
    cos, sin = model.cos[past:end], model.sin[past:end]
    groups = model.shape.heads // model.shape.kv_heads
    for index, layer in enumerate(model.layers):
        q, k, v = layer.qkv(x, cos, sin)  # type: ignore[operator]
        keys[index, :, :, past:end], values[index, :, :, past:end] = k, v
        if past == 0:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            rows, heads, _, width = q.shape
            grouped = q.view(rows, heads // groups, groups, width)
            attended = F.scaled_dot_product_attention(grouped, keys[index, :, :, :end], values[index, :, :, :end])
            attended = attended.view(rows, heads, 1, width)
        x = layer.finish(x, attended)  # type: ignore[operator]
    return F.rms_norm(x, (model.shape.width,), model.norm, model.shape.epsilon)


@torch.inference_mode()
def score(
    model: Backbone,
    head: tuple[Tensor, Tensor],
    sequences: Sequence[Sequence[int]],
    separators: Sequence[Sequence[int]],
) -> list[list[float]]:
    """Return the probability of "good" at the given positions of each sequence."""
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
    results: list[list[float]] = [[] for _ in sequences]
    for start in range(0, len(order), ROWS):
        chunk = order[start : start + ROWS]
        longest = max(len(sequences[index]) for index in chunk)
        ids = torch.zeros(len(chunk), longest, dtype=torch.long)
        for row, index in enumerate(chunk):
            ids[row, : len(sequences[index])] = torch.tensor(list(sequences[index]))
        good = F.linear(model(ids), *head).softmax(-1)[..., 1]
        for row, index in enumerate(chunk):
            results[index] = good[row, list(separators[index])].tolist()
    return results
