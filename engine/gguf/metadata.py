"""The metadata of a GGUF file's architecture: each field is read, known to have no influence, or refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.gguf.file import GgufModel
from engine.protocol.types import EngineError

_WITHOUT_INFLUENCE = {
    *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type", "attention.layer_norm_epsilon"),
    *("leading_dense_block_count", "expert_group_used_count"),  # of no meaning without what they count
}
"""Fields that do not change what a language model of these architectures computes."""
_OTHER_PARTS = ("vision.", "mm.", "audio.")
"""Beginnings of the fields of parts that have tensors of their own."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale", "expert_weights_scale"), (0.0, 1.0)),
    **dict.fromkeys(("attention.output_scale", "attention.value_scale"), (0.0, 1.0)),
    **dict.fromkeys(("expert_group_count", "moe_every_n_layers", "interleave_moe_layer_step"), (0, 1)),
    "expert_gating_func": (0, 1),  # none and softmax
    "attention.causal": (True,),
}
"""Values at which a field changes nothing; of other fields that is zero, false or nothing."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The fields of an architecture, by the name behind its prefix."""

    model: GgufModel
    architecture: str
    """Name of the architecture, or of another that computes a text in the same way."""
    _names_read: set[str] = field(default_factory=set)

    @property
    def prefix(self) -> str:
        """The name in front of the fields' names."""
        return str(self.model.metadata["general.architecture"])

    def get(self, name: str, default: Any = None) -> Any:
        self._names_read.add(name)
        value = self.model.metadata.get(f"{self.prefix}.{name}")
        return default if value is None else value

    def __contains__(self, name: str) -> bool:
        return f"{self.prefix}.{name}" in self.model.metadata

    def require(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise EngineError(f"{self.model.paths[0]} lacks the field {self.prefix}.{name}")
        return value

    def get_number(self, name: str, default: float, *, is_zero_unset: bool = False) -> float:
        """Return a positive number. ``is_zero_unset``: 0 stands for the default."""
        value = float(self.get(name, default))
        if is_zero_unset and value == 0:
            return default
        if not (math.isfinite(value) and value > 0):
            raise self.refuse(name, value, "a positive number")
        return value

    def get_cap(self, name: str, default: float) -> float | None:
        """Return the bound of a soft cap; 0 stands for none."""
        return float(self.get(name, default)) or None

    def get_uniform(self, name: str, default: int | None = None) -> int:
        """Return a number that files may give for each layer; all layers must have the same."""
        value = self.require(name) if default is None else self.get(name, default)
        numbers = np.unique(value)
        if len(numbers) != 1:
            raise EngineError(f"{self.model.paths[0]}: {name} differs between layers, which is not supported")
        return int(numbers[0])

    def expect(self, name: str, *allowed: Any) -> None:
        """Raise ``EngineError`` if the file has the field with a value that is not one of ``allowed``."""
        value = self.get(name)
        if value is not None and not any(_is_close(value, one) for one in allowed):
            raise self.refuse(name, value, " or ".join(f"{one:.6g}" for one in dict.fromkeys(allowed)))

    def ignore(self, *names: str) -> None:
        """Accept any value of fields that have no influence on this architecture."""
        self._names_read.update(names)

    def refuse_rest(self) -> None:
        """Raise ``EngineError`` for a field that was not read and may ask for something."""
        prefix = f"{self.prefix}."
        for key, value in self.model.metadata.items():
            name = key.removeprefix(prefix)
            if name == key or name in self._names_read | _WITHOUT_INFLUENCE or name.startswith(_OTHER_PARTS):
                continue
            allowed = _NEUTRAL.get(name, (0,))
            if not np.all([any(_is_close(one, other) for other in allowed) for one in np.atleast_1d(value)]):
                raise self.refuse(name, value, "absent" if name not in _NEUTRAL else f"{allowed[-1]}")

    def refuse(self, name: str, value: Any, right: str) -> EngineError:
        """Return the error for a field's value."""
        said = f"{value:.6g}" if isinstance(value, float) else f"{value!r:.80}"
        return EngineError(
            f"{self.model.paths[0]}: {self.prefix}.{name} is {said}, which is not supported; it must be {right}"
        )


def _is_close(value: Any, other: Any) -> bool:
    """Return True for equal numbers; those of files have been rounded to float32."""
    if isinstance(value, str):
        return not value
    return bool(np.isclose(float(value), float(other), rtol=1e-6, atol=0))
