"""The sizes of a model that the engine needs, and the reading of a checkpoint's JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.attention.layer import HeadShape, LayerAttentionConfig
from engine.cache.state_layers import StateLayer
from engine.protocol.own_sampling import read_own_sampling
from engine.protocol.types import EngineError

_NO_ATTENTION = LayerAttentionConfig(heads=1, kv_heads=1, head_dim=2, scale=1.0)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and limits that every model has.

    Layers with a sliding window keep every token in the cache, too: keys outside the window are masked, not freed.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    """Width of the final hidden states."""
    max_context: int
    """Maximum number of tokens of one sequence."""
    num_labels: int
    """Outputs per token of a classifier or a reward model; 0 for a language model."""
    eos: tuple[int, ...]
    extra: dict[str, object]
    """Fields named ``reasoner_…``, which the engine passes on to clients."""
    attention: tuple[LayerAttentionConfig, ...]
    """Parameters of each call of attention, in the order of the calls; one for each layer that has keys."""
    num_layers: int
    states: tuple[StateLayer, ...] = field(default=(), kw_only=True)
    """The states of each layer that keeps one, in their order."""
    hidden_scale: float = field(default=1.0, kw_only=True)
    """Factor that turns the hidden states of ``forward`` into those that the architecture defines."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence."""
        return sum(layer.num_bytes for layer in self.states)

    @property
    def head_shapes(self) -> list[HeadShape]:
        """The shape of each call of attention."""
        return [layer.shape for layer in self.attention]

    @property
    def first_attention(self) -> LayerAttentionConfig:
        """Parameters of the first call of attention; of a model without keys, those of the smallest one."""
        return self.attention[0] if self.attention else _NO_ATTENTION

    @property
    def heads(self) -> int:
        return self.first_attention.heads

    @property
    def kv_heads(self) -> int:
        return self.first_attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.first_attention.head_dim


_MODELOPT = "hf_quant_config.json"
"""File in which NVIDIA's ModelOpt describes quantised weights; newer versions do so in ``config.json``."""
_SHARED_FIELDS = ("eos_token_id", "quantization_config", "dtype", "torch_dtype")
"""Fields of a multimodal model that concern its language model, too."""


_OTHER_PARTS = "text_config", "vision_config", "audio_config", "thinker_config"
"""Fields of which a multimodal model has some, for its parts."""
_SAME_FOR_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), ("Qwen2ForCausalLM", {})),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {}),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen3_omni_moe_text": ("Qwen3MoeForCausalLM", {}),
}
"""The class that computes a text as the language model of a multimodal one does, by its model type, and fields that the
other has no choice of. Their positions have three coordinates, which for a text are equal."""
_COORDINATES = "mrope_section", "mrope_interleaved"
"""Fields of a rotary embedding that say which dimensions each coordinate rotates."""


@dataclass(frozen=True, slots=True)
class RawConfig:
    """The fields of ``config.json`` and ``generation_config.json``."""

    folder: Path
    fields: dict[str, Any]
    """The fields of the language model, which may be a part of a multimodal model."""
    generation: dict[str, Any]
    wrapper: str | None = None
    """Name of the multimodal class that the checkpoint was saved from, if the language model is a part of it."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """transformers' values of fields that such a checkpoint leaves out."""

    @property
    def architecture(self) -> str:
        """Name of the class that the checkpoint was saved from."""
        return str(next(iter(self.fields.get("architectures") or []), "none"))

    @property
    def eos(self) -> tuple[int, ...]:
        """Tokens that end a sequence; those of ``generation_config.json`` come first.

        Raises ``EngineError`` for what is no token id.
        """
        value = self.generation.get("eos_token_id", self.fields.get("eos_token_id"))
        if value is None:
            return ()
        tokens = tuple(value) if isinstance(value, list) else (value,)
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            raise EngineError(f"eos_token_id is {value!r:.80}; it must be a token id or a list of them")
        return tokens

    @property
    def sampling(self) -> dict[str, float]:
        """The model's own sampling parameters. Raises ``EngineError`` for a value out of range."""
        return read_own_sampling(self.generation, self.folder / "generation_config.json")

    @property
    def extra(self) -> dict[str, object]:
        return {name: value for name, value in self.fields.items() if name.startswith("reasoner_")}


def read_raw_config(folder: Path) -> RawConfig:
    """Read the configuration files of a checkpoint. Raises ``EngineError`` if the folder is not a checkpoint."""
    if not folder.is_dir():
        raise EngineError(f"{folder} is not a folder; give the folder of a Hugging Face checkpoint")
    fields = read_json(folder / "config.json")
    _check_types(folder / "config.json", fields)
    if not fields.get("quantization_config") and (folder / _MODELOPT).exists():
        fields["quantization_config"] = {"quant_method": "modelopt"} | _read_modelopt(folder / _MODELOPT)
    generation = folder / "generation_config.json"
    generation_fields = read_json(generation) if generation.exists() else {}
    if _is_wrapper(fields):
        return _read_wrapper(folder, fields, generation_fields)
    if not fields.get("architectures"):
        fields["architectures"] = [_find_causal_model(folder, fields.get("model_type"))]
    return RawConfig(folder, fields, generation_fields)


def _read_modelopt(path: Path) -> dict[str, Any]:
    quantization = read_json(path).get("quantization")
    if not isinstance(quantization, dict):
        raise EngineError(f"{path}: quantization is {quantization!r:.80}; it must be an object")
    return quantization


def _is_wrapper(fields: dict[str, Any]) -> bool:
    """Return True for a model that wraps a language model together with encoders of images or sound."""
    names = fields.get("architectures") or [""]
    has_parts = any(isinstance(fields.get(name), dict) for name in _OTHER_PARTS)
    return has_parts and not names[0].endswith("ForCausalLM")


def _read_wrapper(folder: Path, fields: dict[str, Any], generation: dict[str, Any]) -> RawConfig:
    """Return the configuration of the language model in a multimodal one, as if it had been saved alone."""
    # Imported here, since it takes a second that most models do not need.
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise EngineError(
            f"{folder / 'config.json'} is a multimodal model that transformers cannot read: {error}"
        ) from None
    text = whole.get_text_config()
    name = (fields.get("architectures") or [type(whole).__name__])[0]
    shared = {key: fields[key] for key in _SHARED_FIELDS if fields.get(key) is not None}
    shared |= {key: value for key, value in fields.items() if key.startswith("reasoner_")}
    # Some files have the fields of the language model beside those of the encoders, or deeper.
    inner_fields = fields.get("text_config") or text.to_dict()
    own = shared | {key: _drop_coordinates(value) for key, value in inner_fields.items() if value is not None}
    # The whole model ties them, or its part does; where the file has a head of its own, that is the head (``Decoder``).
    own["tie_word_embeddings"] = any(getattr(one, "tie_word_embeddings", False) for one in (whole, text))
    same, fixed_fields = _find_language_model(text)
    own |= fixed_fields | {"architectures": [same or name]}
    defaults = {key: _drop_coordinates(value) for key, value in text.to_dict().items()}
    return RawConfig(folder, own, generation=generation, wrapper=name, defaults=defaults)


def _find_language_model(text: Any) -> tuple[str | None, dict[str, Any]]:
    """Return the class of language models that compute a text as the one with the config ``text`` does, and fields that
    it needs; ``None`` if there is none, and the whole multimodal model must be computed."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if text.model_type in _SAME_FOR_TEXT:
        return _SAME_FOR_TEXT[text.model_type]
    inner = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    return None if inner is None else str(inner.__name__), {}


def _drop_coordinates(value: Any) -> Any:
    """Return the settings of a rotary embedding without ``_COORDINATES``; any other value as it is."""
    if not isinstance(value, dict) or not any(name in value for name in _COORDINATES):
        return value
    kept = {name: part for name, part in value.items() if name not in _COORDINATES}
    return {name: "default" if part == "mrope" else part for name, part in kept.items()}


def _check_types(path: Path, fields: dict[str, Any]) -> None:
    names = fields.get("architectures")
    if names and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise EngineError(f"{path}: architectures is {names!r:.80}; it must be a list of names")
    quantization = fields.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise EngineError(f"{path}: quantization_config is {quantization!r:.80}; it must be an object")


def _find_causal_model(folder: Path, model_type: object) -> str:
    """Return transformers' class for language models of a ``model_type``."""
    # Imported here, since it takes a second that most models do not need.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise EngineError(
            f"{folder / 'config.json'} has no architectures, and model_type {model_type!r} is no causal language model"
        )
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a checkpoint's JSON file. Raises ``EngineError`` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineError(f"{path.parent} has no {path.name}; give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise EngineError(f"{path} is not a JSON object")
    return value


@contextmanager
def name_bad_fields(path: Path) -> Iterator[None]:
    """Raise ``EngineError`` naming the file where its reader lacks a field, or finds one of the wrong type."""
    try:
        yield
    except KeyError as missing:
        raise EngineError(f"{path} lacks {missing}") from None
    except (TypeError, ValueError) as error:
        raise EngineError(f"{path} has a value of the wrong type: {error}") from None
