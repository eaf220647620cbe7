"""A LoRA adapter's matrices, from ``adapter_model.safetensors``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.adapters.config import AdapterConfig, read_adapter_config
from engine.adapters.judge import JUDGE_NOTE, load_judge
from engine.protocol.types import EngineError
from engine.weights.safetensors import inner_name

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FLOATS = torch.float32, torch.float16, torch.bfloat16


class Factors(NamedTuple):
    """The two matrices of a module's update."""

    down: Tensor
    """float32 ``[rank, in]``."""
    up: Tensor
    """float32 ``[out, rank]``, times the scale."""


@dataclass(slots=True)
class Adapter:
    """An adapter as it was saved, whose matrices a model takes module by module."""

    name: str
    folder: Path
    config: AdapterConfig
    extra: dict[str, object]
    """Entries of ``ModelInfo.extra``: how a verifier asks it, if it is one."""
    factors: dict[str, Factors]
    """Matrices by the name of the module, such as ``model.layers.0.self_attn.q_proj``; those not yet taken."""
    parameters: int = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = sum(matrix.numel() for factors in self.factors.values() for matrix in factors)

    def take(self, module: str, rows: int, columns: int) -> Factors | None:
        """Take the matrices for a module with weights ``[rows, columns]``; ``None`` if it is not changed.

        Raises ``EngineError`` if they are missing or have the shapes of another base.
        """
        factors = self.factors.pop(module, None)
        if factors is None:
            if self.config.targets(module):
                raise EngineError(f"adapter {self.name!r} ({self.folder}) lacks the matrices of {module}")
            return None
        own = len(factors.up), factors.down.shape[1]
        if own != (rows, columns):
            hint = f", {self.config.base_model}" if self.config.base_model else ""
            raise EngineError(
                f"adapter {self.name!r} ({self.folder}) is of another base{hint}: {module} has weights of {own[0]} by "
                f"{own[1]} there, and {rows} by {columns} in this model"
            )
        return factors

    def finish(self) -> None:
        """Raise ``EngineError`` if matrices are left over: their modules are not among those that can be adapted."""
        if self.factors:
            raise EngineError(
                f"adapter {self.name!r} ({self.folder}) changes {min(self.factors)}, which this model does not have or "
                "which cannot be adapted here; attention and dense feed-forward layers can"
            )


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read the adapter in a folder. Raises ``EngineError`` with the reason if it is damaged or not supported."""
    config = read_adapter_config(folder)
    tensors = _read_tensors(folder / WEIGHTS_FILE)
    factors: dict[str, Factors] = {}
    for module in sorted({module for module, _ in tensors}):
        down, up = tensors.get((module, "A")), tensors.get((module, "B"))
        if down is None or up is None:
            missing = "lora_A" if down is None else "lora_B"
            raise EngineError(f"{folder / WEIGHTS_FILE} lacks {missing} of {module}")
        rank = config.find_rank(module)
        if down.dim() != 2 or up.dim() != 2 or (len(down), up.shape[1]) != (rank, rank):
            raise EngineError(
                f"{folder / WEIGHTS_FILE}: the matrices of {module} have shapes {tuple(down.shape)} and "
                f"{tuple(up.shape)}; its adapter_config.json says rank {rank}"
            )
        if not (down.isfinite().all() and up.isfinite().all()):
            raise EngineError(f"{folder / WEIGHTS_FILE}: the matrices of {module} are not finite")
        factors[module] = Factors(down, up * config.find_scale(module))
    if not factors:
        raise EngineError(f"{folder / WEIGHTS_FILE} has no matrices")
    judge = load_judge(folder)
    extra: dict[str, object] = {} if judge is None else {JUDGE_NOTE: judge.to_json()}
    return Adapter(name, folder, config, extra=extra, factors=factors)


def _read_tensors(path: Path) -> dict[tuple[str, str], Tensor]:
    """Return the float32 matrices of a file by module and letter, ``A`` or ``B``."""
    tensors: dict[tuple[str, str], Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                module, _, kind = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".lora_")
                if kind not in {"A", "B"} or not name.startswith(_PREFIX):
                    raise EngineError(f"{path}: the tensor {name!r} is no matrix of LoRA, which are …lora_A.weight")
                tensor = file.get_tensor(name)
                if tensor.dtype not in _FLOATS:
                    raise EngineError(f"{path}: {name!r} is {tensor.dtype}; supported are float32, float16, bfloat16")
                tensors[inner_name(module) or module, kind] = tensor.float()
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path} is not a readable safetensors file: {error}") from None
    return tensors
