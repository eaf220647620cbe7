"""Probes: small heads on a policy's hidden states that estimate how likely its solution is to end right.

A probe reads the state of the last token that the policy was fed when it sampled the latest one, in other words the
state that predicted a step's last token (a separator, or the end of the sequence). Decoding computes that state anyway,
so a score costs no forward pass; the last token's own state would exist only after one more.

Sources: Kadavath et al. 2022, https://arxiv.org/abs/2207.05221, section 5; Zhang et al. 2025, "Reasoning Models Know
When They're Right", https://arxiv.org/abs/2504.05419.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from engine.models.config import ModelConfig, read_json
from engine.protocol.types import EngineError, ProbeInfo

SHIPPED = "probe"
"""Folder of a probe inside a checkpoint's folder, and the suffix of its folder beside a GGUF file."""
SETTINGS, TENSORS = "probe.json", "probe.safetensors"
"""Files of a probe's folder."""
_VERSION = 1

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Probe:
    """A linear head, or one with a hidden layer (ReLU). Standardization and calibration are part of its weights."""

    fingerprint: str
    """Fingerprint of the model that it was fitted for."""
    layers: tuple[int, ...]
    """Layers whose states it reads, ascending; from 1, the last one is the input of the final norm."""
    weight: Floats
    """``[units, layers * hidden]``; one unit if the head is linear."""
    bias: Floats
    """``[units]``."""
    output_weight: Floats | None = None
    """``[units]``; ``None`` if the head is linear."""
    output_bias: float = 0.0

    def estimate(self, states: Floats) -> Floats:
        """Return the probability of being right for each of ``states`` ``[rows, layers * hidden]``."""
        units = states @ self.weight.T + self.bias
        logits = units[:, 0]
        if self.output_weight is not None:
            logits = np.maximum(units, 0.0) @ self.output_weight + self.output_bias
        return np.exp(-np.logaddexp(0.0, -logits))

    def save(self, folder: Path, notes: Mapping[str, Any]) -> None:
        """Write the probe's two files into an existing folder. ``notes``: how it was fitted, for people."""
        settings = {"version": _VERSION, "fingerprint": self.fingerprint, "layers": list(self.layers)}
        (folder / SETTINGS).write_text(json.dumps(settings | dict(notes), indent=2) + "\n", encoding="utf-8")
        tensors = {"weight": self.weight, "bias": self.bias}
        if self.output_weight is not None:
            tensors |= {"output_weight": self.output_weight, "output_bias": np.array([self.output_bias])}
        save_file({name: tensor.astype(np.float32) for name, tensor in tensors.items()}, folder / TENSORS)

    @classmethod
    def load(cls, folder: Path, config: ModelConfig, fingerprint: str, model: Path) -> Probe:
        """Read a probe for the model in the folder ``model``. Raises ``EngineError`` if it is damaged or another's."""
        if not (folder / SETTINGS).is_file():
            raise EngineError(f"{folder} has no {SETTINGS}: name a folder that 'reasoner prm train --probe' wrote")
        settings = read_json(folder / SETTINGS)
        if settings.get("version") != _VERSION:
            raise EngineError(f"{folder}: version {settings.get('version')!r} of a probe is not known, only {_VERSION}")
        if settings.get("fingerprint") != fingerprint:
            raise EngineError(
                f"{folder}: the probe was fitted for the model with fingerprint {settings.get('fingerprint')!r}, and "
                f"{model} has {fingerprint!r}: fit one with 'reasoner prm train --probe --base {model}'"
            )
        layers = settings.get("layers")
        existing = range(1, config.num_layers + 1)
        if not (isinstance(layers, list) and layers and all(layer in existing for layer in layers)):
            raise EngineError(f"{folder}: layers are {layers!r}; they must be from 1 to {config.num_layers}")
        try:
            tensors = {name: tensor.astype(np.float64) for name, tensor in load_file(folder / TENSORS).items()}
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{folder / TENSORS} is not a readable safetensors file: {error}") from None
        units = len(tensors["bias"]) if "bias" in tensors else 1
        shapes = {"weight": (units, len(layers) * config.hidden_size), "bias": (units,)}
        if "output_weight" in tensors or units != 1:
            shapes |= {"output_weight": (units,), "output_bias": (1,)}
        actual = {name: tensor.shape for name, tensor in tensors.items()}
        if actual != shapes:
            raise EngineError(f"{folder / TENSORS}: its tensors are {actual}; they must be {shapes}")
        output_bias = float(tensors["output_bias"][0]) if "output_bias" in tensors else 0.0
        output_weight = tensors.get("output_weight")
        return cls(fingerprint, tuple(layers), tensors["weight"], tensors["bias"], output_weight, output_bias)

    @property
    def info(self) -> ProbeInfo:
        """Description for clients."""
        tensors = [self.weight, self.bias, *([] if self.output_weight is None else [self.output_weight])]
        digest = blake2b(repr((self.fingerprint, self.layers, self.output_bias)).encode(), digest_size=8)
        for tensor in tensors:
            digest.update(np.ascontiguousarray(tensor).tobytes())
        return ProbeInfo(digest.hexdigest(), self.layers, sum(tensor.size for tensor in tensors))


def load_probe(wanted: str, folder: Path, gguf: Sequence[Path], config: ModelConfig, fingerprint: str) -> Probe | None:
    """Load the probe that an option selects for the model in ``folder``; ``None`` for none, and for classifiers.

    ``wanted``: ``auto`` (the checkpoint's own, if it has one), ``off`` or the probe's folder. ``gguf``: the model's
    GGUF files, if it has any.
    """
    if wanted == "off" or config.num_labels:
        return None
    where = Path(wanted)
    if wanted == "auto":
        where = gguf[0].with_suffix(f".{SHIPPED}") if gguf else folder / SHIPPED
        if not where.is_dir():
            return None
    return Probe.load(where, config, fingerprint, gguf[0] if gguf else folder)


class ProbeReader:
    """Scores of one step's tokens from its hidden states."""

    def __init__(
        self,
        probe: Probe,
        *,
        kept: Mapping[int, Tensor],
        hidden: Tensor,
        rows: Sequence[int] | None,
        num_layers: int,
        hidden_scale: float = 1.0,
    ) -> None:
        """``kept`` and ``hidden``: as of ``Forward``, which computed ``hidden`` for the tokens in ``rows`` alone.
        ``hidden_scale``: that of the model's config."""
        self._probe = probe
        self._kept = kept
        self._hidden = hidden
        self._rows = rows
        self._num_layers, self._hidden_scale = num_layers, hidden_scale

    def read(self, index: int) -> float:
        """Return the score of the token whose final hidden state is at ``index``."""
        row = index if self._rows is None else self._rows[index]
        states = [
            self._hidden[index] if layer == self._num_layers else self._kept[layer][row] for layer in self._probe.layers
        ]
        values = torch.cat([state.float() * self._hidden_scale for state in states]).cpu().numpy().astype(np.float64)
        return float(self._probe.estimate(values[None])[0])
