"""Names of a GGUF file's tensors, from those of a Hugging Face checkpoint."""

from __future__ import annotations

import re

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")


_DECAY = ".linear_attn.A"
"""End of the name of a layer's factors of decay, of which a checkpoint has the logarithm."""


class TensorNames:
    """Map of one model's names."""

    def __init__(self, architecture: str, num_layers: int) -> None:
        kinds: dict[str, MODEL_ARCH] = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
        self._map = get_tensor_name_map(kinds[architecture], num_layers)

    def find(self, name: str) -> tuple[str, int | None]:
        """Return the tensor's name, and the index of an expert in it, as all experts of a layer are one tensor."""
        expert, index = _EXPERT.fullmatch(name), None
        if expert:
            name, index = expert[1] + expert[3], int(expert[2])
        name = name.replace(".dt_bias", ".dt_proj.bias")
        if name.endswith(_DECAY):
            return str(self._map.get_name(f"{name}_log")), None
        name = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
        stem, _, kind = name.rpartition(".")
        found = self._map.get_name(stem)
        if found is None:  # the name of a parameter without a module of its own
            found, kind = self._map.get_name(name), "weight"
        return (name if found is None else f"{found}.{kind}"), index
