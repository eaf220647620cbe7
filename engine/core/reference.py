"""The model of a folder as transformers computes it: in float32, in float64, and with rounded activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from engine.core.gguf_reference.header import read_gguf_header
from engine.core.gguf_reference.weights import arrange_weights
from engine.gguf.folder import weight_files
from engine.models.config import RawConfig
from engine.models.load import choose_class, choose_decoder, open_weights
from engine.protocol.types import EngineError
from engine.weights.formats import mxfp4
from engine.weights.matrix import dense
from engine.weights.safetensors import Weights

_LEVELS = 127


class _NoFloat32(TorchFunctionMode):
    """Replaces float32 by float64 wherever code names it.

    transformers computes norms, rotary angles and softmax in float32 whatever the dtype of the model. That widens
    16-bit dtypes, but would narrow float64.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function == torch.Tensor.float:
            function = torch.Tensor.double
        named = {name: _widen_dtype(value) for name, value in (kwargs or {}).items()}
        return function(*map(_widen_dtype, args), **named)


def _widen_dtype(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@contextmanager
def float64() -> Iterator[None]:
    """Let transformers load and compute models entirely in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), _NoFloat32():
            yield
    finally:
        torch.set_default_dtype(before)


class _RoundedActivations(TorchFunctionMode):
    """Rounds the inputs of products to 8 bits, row by row, except those of the output projection."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.linear and args[1].shape[0] != self._vocab_size:
            step = args[0].abs().amax(-1, keepdim=True).clamp_min(1e-30) / _LEVELS
            args = ((args[0] / step).round() * step, *args[1:])
        return function(*args, **(kwargs or {}))


class Reference:
    """A model by transformers' code, with the weights that our own code reads from quantised files."""

    def __init__(self, raw: RawConfig, context: int) -> None:
        """Raises ``EngineError`` if transformers does not have the architecture.

        ``context``: maximum number of tokens that the engine serves, on which the positions of some models depend.
        """
        import transformers

        self._class: Any = getattr(transformers, raw.wrapper or raw.architecture, None)
        if self._class is None:
            raise EngineError(f"{raw.folder}: transformers has no {raw.architecture} to compare with")
        self._raw = raw
        self._context = context
        files = weight_files(raw.folder)
        self._header = read_gguf_header(files[0]) if files else None
        is_quantized = bool(raw.fields.get("quantization_config") or files)
        self._weights = _read_dense_weights(raw) if is_quantized else None

    def compute_float64(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the exact logits ``[tokens, vocab]`` of each text."""
        with float64():
            return _compute(self._load(torch.float64), texts)

    def compute_float32(
        self, texts: Sequence[Sequence[int]], *, rounds_activations: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the logits in float32, and those of a run with the roundings of the engine's layout."""
        model = self._load(torch.float32)
        with torch.no_grad():
            logits = _compute(model, texts)
            if not rounds_activations:
                return logits, logits
            with _RoundedActivations(int((self._raw.defaults | self._raw.fields)["vocab_size"])):
                return logits, _compute(model, texts)

    def _load(self, dtype: torch.dtype) -> Any:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        options = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
        if self._weights is None:
            source: Any = self._raw.folder
            options |= {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
        else:
            source, config, weights = None, self._create_config(), dict(self._weights)
            if self._header is not None:
                weights = arrange_weights(self._header.architecture, config, weights)
            options |= {"config": config, "state_dict": weights}
        model, report = self._class.from_pretrained(source, output_loading_info=True, **options)
        if missing := sorted(map(str, report["missing_keys"])):
            raise EngineError(f"{self._raw.folder}: transformers misses the tensors {', '.join(missing[:4])}")
        if self._header is not None:
            self._header.set_rotary(model, self._context)
        return model.eval()

    def _create_config(self) -> Any:
        """Return the config of a model whose weights are quantised."""
        if self._header is not None:
            return self._header.create_config(self._class.config_class, int(self._raw.fields["vocab_size"]))
        fields = {name: value for name, value in self._raw.fields.items() if name != "quantization_config"}
        return self._class.config_class.from_dict(fields)


def _compute(model: Any, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    return [model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0] for text in texts]


def _read_dense_weights(raw: RawConfig) -> Mapping[str, Tensor]:
    """Return the weights of a quantised model by their names in a checkpoint, in float32."""
    config = choose_decoder(raw)
    if isinstance(config, str):
        raise EngineError(f"{config}: its quantised weights cannot be read")
    weights, read = open_weights(raw)
    recorder = _Recorder(weights)

    def read_dense(_: Weights, name: str, rows: int, columns: int) -> Tensor:
        matrix = dense(read(weights, name, rows, columns))
        recorder.taken[f"{name}.weight"] = matrix
        return matrix

    choose_class(config)(config, cast(Weights, recorder), 1, read_dense)
    return recorder.taken | _read_stacks(recorder.raw)


def _read_stacks(raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of experts in MXFP4 as transformers holds them, ``[experts, in, out]``."""
    names = [name.removesuffix("_blocks") for name in raw if name.endswith("_blocks")]
    return {
        name: torch.stack(
            [
                mxfp4.arrange(name, *one).dense().T
                for one in zip(raw[f"{name}_blocks"], raw[f"{name}_scales"], strict=True)
            ]
        )
        for name in names
    }


class _Recorder:
    """Weights that keep what is taken."""

    def __init__(self, weights: Weights) -> None:
        self.taken: dict[str, Tensor] = {}
        self.raw: dict[str, Tensor] = {}
        """Tensors of packed numbers."""
        self._weights = weights

    def take(self, name: str, *shape: int) -> Tensor:
        self.taken[name] = self._weights.take(name, *shape)
        return self.taken[name]

    def take_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        self.taken[f"{name}.weight"] = dense(self._weights.take_matrix(name, rows, columns))
        return self.taken[f"{name}.weight"]

    def take_raw(self, name: str, dtype: torch.dtype | None, *shape: int) -> Tensor:
        tensor = self._weights.take_raw(name, dtype, *shape)
        (self.taken if tensor.is_floating_point() else self.raw)[name] = tensor
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)
