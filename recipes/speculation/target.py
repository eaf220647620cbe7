"""The target of the training, computed by transformers on any device: hidden states, embedding and logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.config import read_raw_config
from engine.models.families.read import decoder_config, is_defined


class Target:
    """A frozen causal language model of the Llama family (``engine.models.families.table``)."""

    def __init__(self, folder: Path, device: str) -> None:
        """Load the model in float32 on the CPU, in the checkpoint's own data type elsewhere."""
        from transformers import AutoModelForCausalLM

        raw = read_raw_config(folder)
        if not is_defined(raw.architecture):
            raise SystemExit(f"{folder}: heads are not trained for the architecture {raw.architecture}")
        self.folder, self.device = folder, device
        self.config = decoder_config(raw)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32 if device == "cpu" else "auto",
        )
        self.model.to(device).eval().requires_grad_(False)
        self._body = self.model.get_decoder()
        self._read_last = torch.empty(0)
        """Latest input of the last norm."""
        self._body.norm.register_forward_pre_hook(lambda _, inputs: setattr(self, "_read_last", inputs[0]))
        self._read_states: dict[int, Tensor] = {}
        """Latest hidden states after each observed layer, numbered from 1."""
        table = self.model.get_input_embeddings().weight
        self.embedding_scale = 1 / float(table.float().square().mean().sqrt())
        """Factor that scales the embedding table's entries to a mean square of 1."""

    def observe(self, layers: Sequence[int]) -> None:
        """Keep the hidden states after these layers, numbered from 1 and before the last, of all later texts."""
        for layer in set(layers) - self._read_states.keys():
            self._read_states[layer] = torch.empty(0)
            self._body.layers[layer].register_forward_pre_hook(
                lambda _, inputs, layer=layer: self._read_states.update({layer: inputs[0]})
            )

    @property
    def states(self) -> Tensor:
        """Return the hidden states after the observed layers, side by side, of the texts of the last ``features``."""
        return torch.cat([self._read_states[layer].float() for layer in sorted(self._read_states)], dim=-1)

    @property
    def output_weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights of the last norm and of the output projection, in float32."""
        return self._body.norm.weight.float(), self.model.get_output_embeddings().weight.float()

    @torch.no_grad()
    def features(self, ids: Tensor) -> Tensor:
        """Return the final hidden states before the last norm, which the engine passes to drafters.

        float32 ``[texts, tokens, hidden]``; ``ids`` ``[texts, tokens]`` are padded on the right."""
        self._body(input_ids=ids, use_cache=False)
        return self._read_last.float()

    def embed(self, ids: Tensor) -> Tensor:
        """Return rows of the embedding table, scaled."""
        rows: Tensor = self.model.get_input_embeddings().weight[ids].float() * self.embedding_scale
        return rows

    def read(self, features: Tensor) -> Tensor:
        """Return the float32 logits of hidden states."""
        normal = self._body.norm(features.to(self.model.dtype))
        logits: Tensor = self.model.lm_head(normal).float()
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
