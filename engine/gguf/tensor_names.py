"""Names of a GGUF file's tensors, from those of a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

from engine.gguf.fields.mamba import SINGLE_PART

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)\.(\w+)")
_DECAY = re.compile(r"(.*\.(?:linear_attn|mamba|mixer)\.A)")
"""Name of a layer's factors of decay, of which a checkpoint has the logarithm."""
_WITHOUT_KIND = re.compile(r".*\.(mamba|mixer)\.D")
"""Names of parameters that are no module's weight in a file, either."""
_AROUND_PREDICTION = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "shared_head_norm"}
"""Names of what only a layer that predicts several tokens has."""
_QWEN_AROUND = {
    **{"mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm"},
    "mtp.norm": "shared_head_norm",
}
_SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
"""Parameters of Gemma 4, which a file has as further ones of other modules."""


class TensorNames:
    """Map of one model's names."""

    def __init__(
        self, architecture: str, num_layers: int, num_predicting: int = 0, *, has_experts: bool = False
    ) -> None:
        """``num_layers``: all of them, of which the last ``num_predicting`` predict several tokens."""
        kinds: dict[str, MODEL_ARCH] = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
        self._map = get_tensor_name_map(kinds[architecture], num_layers)
        self._rules = _list_rules(architecture, has_experts=has_experts)
        self.first_predicting = num_layers - num_predicting
        """Index of the first layer that predicts several tokens."""

    def find(self, name: str) -> tuple[str, int | None]:
        """Return the tensor's name, and the index of an expert in it, as all experts of a layer are one tensor."""
        stem, _, kind = name.rpartition(".")
        if stem in _QWEN_AROUND:
            return f"blk.{self.first_predicting}.nextn.{_QWEN_AROUND[stem]}.{kind}", None
        name = name.replace("mtp.layers.0.", f"model.layers.{self.first_predicting}.")
        if layer := _LAYER.fullmatch(name):
            number, part, kind = layer.groups()
            if part in _AROUND_PREDICTION:
                return f"blk.{number}.nextn.{_AROUND_PREDICTION[part]}.{kind}", None
            if f"{part}.{kind}" in _SCALES:
                return f"blk.{number}.{_SCALES[f'{part}.{kind}']}", None
        for pattern, replacement in self._rules:
            name = re.sub(pattern, replacement, name)
        return self._translate(name)

    def _translate(self, name: str) -> tuple[str, int | None]:
        expert, index = _EXPERT.fullmatch(name), None
        if expert:
            name, index = expert[1] + expert[3], int(expert[2])
        name = name.replace(".dt_bias", ".dt_proj.bias")
        if _DECAY.fullmatch(name):
            return str(self._map.get_name(f"{name}_log")), None
        if _WITHOUT_KIND.fullmatch(name):
            return str(self._map.get_name(name)), None
        name = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
        stem, _, kind = name.rpartition(".")
        found = self._map.get_name(stem)
        if found is not None:
            return f"{found}.{kind}", index
        # The name of a parameter without a module of its own, or one that the file has no kind of.
        found = self._map.get_name(name)
        return found or name if found is None or kind == "weight" else f"{found}.weight", index


def _list_rules(architecture: str, *, has_experts: bool) -> Sequence[tuple[str, str]]:
    """Return what is replaced in names before the package ``gguf`` translates them, which has others for some."""
    if architecture in SINGLE_PART:
        return (
            (r"^model\.layers\.(\d+)\.mixer\.experts\.", r"model.layers.\1.mlp.experts."),
            (r"^model\.layers\.(\d+)\.(mixer|norm)\.", r"backbone.layers.\1.\2."),
        )
    if architecture == "granitehybrid":
        shared = "mlp.shared_expert" if has_experts else "mlp"
        return (
            (r"\.block_sparse_moe\.experts\.", ".mlp.experts."),
            (r"\.shared_mlp\.(gate|up)_proj\.", rf".{shared}.\1_proj."),
            (r"\.shared_mlp\.output_linear\.", f".{shared}.down_proj."),
        )
    return ()
