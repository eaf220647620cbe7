"""The model that heads are trained for, by transformers, on any device: its hidden states, embedding and head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.config import read_raw_config
from engine.models.families import decoder_config, is_defined


class Target:
    """A frozen causal language model of the Llama family (``engine.models.families``)."""

    def __init__(self, folder: Path, device: str) -> None:
        """float32 on the CPU, the checkpoint's own type elsewhere."""
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
        """What the last norm was last given."""
        self._body.norm.register_forward_pre_hook(lambda _, inputs: setattr(self, "_read_last", inputs[0]))
        table = self.model.get_input_embeddings().weight
        self.embedding_scale = 1 / float(table.float().square().mean().sqrt())
        """With it the table's entries have a mean square of 1."""

    @torch.no_grad()
    def features(self, ids: Tensor) -> Tensor:
        """Final hidden states before the last norm, as the engine's drafters see them: float32 ``[texts, tokens,
        hidden]`` of texts that are padded on the right, ``[texts, tokens]``."""
        self._body(input_ids=ids, use_cache=False)
        return self._read_last.float()

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the embedding table, scaled."""
        rows: Tensor = self.model.get_input_embeddings().weight[ids].float() * self.embedding_scale
        return rows

    def read(self, features: Tensor) -> Tensor:
        """float32 logits of any hidden states."""
        normal = self._body.norm(features.to(self.model.dtype))
        logits: Tensor = self.model.lm_head(normal).float()
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
