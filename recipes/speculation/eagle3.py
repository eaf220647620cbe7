"""An EAGLE-3 head for training, computed over whole texts like those of ``heads``, exported in a public format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.speculation.heads import EPS, attend, random_matrix, rotate, save_head, target_sizes
from recipes.speculation.target import Target


def choose_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the numbers of the layers, from 1, whose hidden states a head fuses: published heads' if possible."""
    if num_layers < 4:
        raise SystemExit(f"the target has {num_layers} layers; eagle3 needs at least 4")
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 7 else (1, num_layers // 2, num_layers - 1)


class Eagle3(nn.Module):
    """EAGLE-3: one decoder layer on fused hidden states, unrolled over its own outputs as in drafting.

    Its vocabulary is the target's, whose norm and output projection it starts from."""

    def __init__(self, target: Target, levels: int) -> None:
        super().__init__()
        config = target.config
        self.layers = choose_layers(config.num_layers)
        target.observe(self.layers)
        hidden, inner = config.hidden_size, config.intermediate
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        # The head starts with the highest hidden state alone.
        first = torch.cat((torch.zeros(hidden, 2 * hidden), torch.eye(hidden)), 1)
        self.fc = nn.Parameter(first + 0.1 * random_matrix(hidden, 3 * hidden))
        self.q, self.k = (nn.Parameter(random_matrix(rows, 2 * hidden)) for rows in (queries, keys))
        self.v, self.o = (
            nn.Parameter(random_matrix(keys, 2 * hidden)),
            nn.Parameter(random_matrix(hidden, queries) * 0.5),
        )
        self.gate, self.up = (nn.Parameter(random_matrix(inner, hidden)) for _ in range(2))
        self.down = nn.Parameter(random_matrix(hidden, inner) * 0.5)
        self.embedding_norm, self.hidden_norm, self.mlp_norm = (nn.Parameter(torch.ones(hidden)) for _ in range(3))
        norm, head = target.output_weights
        self.norm, self.head_embedding = nn.Parameter(norm.clone()), nn.Parameter(head.clone())
        self._levels, self._config, self._embedding_scale = levels, config, target.embedding_scale
        self._theta = config.ropes[0].parameters["rope_theta"]

    def inputs(self, target: Target, _features: Tensor) -> Tensor:
        """Return what the head reads of the texts whose features the target computed last."""
        return target.states

    def read(self, _target: Target, state: Tensor) -> Tensor:
        """Return the float32 logits of outputs."""
        return F.linear(_rms(state, self.norm), self.head_embedding).float()

    def forward(self, states: Tensor, embedded: Tensor) -> Iterator[Tensor]:
        """Yield the outputs of each level: ``[texts, positions, hidden]``, of which each has one position less.

        ``states``: ``[texts, tokens, 3 * hidden]``, ``embedded``: ``[texts, tokens, hidden]``."""
        config, tokens = self._config, states.shape[1]
        groups = config.heads // config.kv_heads
        before = torch.ones(tokens - 1, tokens - 1, dtype=torch.bool, device=states.device).tril()
        entries: list[tuple[Tensor, Tensor]] = []
        state, embedded = F.linear(states, self.fc), embedded / self._embedding_scale
        for level in range(self._levels):
            count = tokens - 1 - level
            state = state[:, :count]
            following = embedded[:, 1 + level : 1 + level + count]
            both = torch.cat((_rms(following, self.embedding_norm), _rms(state, self.hidden_norm)), -1)
            q, k, v = (
                F.linear(both, weight).view(*both.shape[:2], -1, config.head_dim).transpose(1, 2)
                for weight in (self.q, self.k, self.v)
            )
            q, k = rotate(q, level, self._theta), rotate(k, level, self._theta)
            entries.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
            mixed = attend(q * config.head_dim**-0.5, entries, before[:count])
            state = state + F.linear(mixed.transpose(1, 2).flatten(2), self.o)
            normal = _rms(state, self.mlp_norm)
            state = state + F.linear(F.silu(F.linear(normal, self.gate)) * F.linear(normal, self.up), self.down)
            yield state

    def save(self, folder: Path, target: Target) -> None:
        """Write the checkpoint in SafeAILab's format."""
        config = {
            "kind": "eagle3",
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **target_sizes(target),
            "draft_vocab_size": target.config.vocab_size,
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
            "intermediate_size": target.config.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": target.config.heads,
            "num_key_value_heads": target.config.kv_heads,
            "head_dim": target.config.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": target.config.max_context,
            "rms_norm_eps": EPS,
            "rope_theta": self._theta,
        }
        names = {
            **{name: f"midlayer.self_attn.{name}_proj" for name in "qkvo"},
            **{name: f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")},
            "embedding_norm": "midlayer.input_layernorm",
            "hidden_norm": "midlayer.hidden_norm",
            "mlp_norm": "midlayer.post_attention_layernorm",
            "norm": "norm",
            "fc": "fc",
            "head_embedding": "lm_head",
        }
        save_head(folder, config, {f"{public}.weight": getattr(self, name) for name, public in names.items()})


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    normal: Tensor = F.rms_norm(x, weight.shape, weight, EPS)
    return normal
