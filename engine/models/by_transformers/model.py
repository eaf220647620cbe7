"""Run causal language models that have no decoder here by transformers' code, through its attention interface.

Of a multimodal model whose language model has no class of its own the whole is loaded, and its encoders are dropped.

A model's layers call an attention function by name. Ours passes queries, keys and values to the engine's attention over
the paged cache, so a step is one flat batch and transformers keeps no cache of its own.

Such code may need more than paged attention computes: position biases, attention sinks, layers that keep a state. What
shows in the calls is refused by name; the rest is found by a self-test when the model is loaded. Two texts are computed
side by side in pieces, as the engine would, and their logits must equal those of the unchanged model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from engine.attention.layer import AttentionBackend, LayerAttentionConfig
from engine.cache.state_layers import NO_STATE, StateSegment, StateStep
from engine.device import CPU
from engine.models.by_transformers.attention import (
    NAME,
    AttentionTracer,
    DenseAttention,
    PagedAttentionHandler,
    handle_attention,
    register,
)
from engine.models.by_transformers.states import list_states, use_states, wrap_mixers
from engine.models.config import ModelConfig, RawConfig
from engine.models.interface import Batch, KeepState
from engine.protocol.types import EngineError
from engine.weights.safetensors import Weights

_TOLERANCE = 1e-4
"""Largest difference of logits in the self-test, relative to the largest logit where that exceeds 1."""
_SELF_TEST_CUTS = ((0, 8, 9, 21), (0, 5, 14, 17))
"""Positions at which each of the two texts is cut."""
_REFUSED_FIELDS = {
    "alibi": "ALiBi position biases",
    "use_bidirectional_attention": "attention that is not causal",
    "attention_window_size": "recurrent layers",
    "index_topk": "sparse attention with an indexer",
}
"""Config fields for features that paged attention does not support."""
_KNOWN_LAYERS = {
    *("full_attention", "sliding_attention", "chunked_attention", "attention"),
    *("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"),
    *("mlp", "moe", "dense", "sparse"),
}
"""Kinds of layers that need attention over all keys or a window of them, a state in transformers' cache, or neither."""
_MAX_CONTEXT = 1 << 17
"""Tokens of a sequence of a model that sets no limit."""
_ALIBI = ("bloom", "mpt")
"""Model types that have ALiBi without a field for it."""


class TransformersModel:
    """A ``Model`` whose layers are those of transformers, in float32 on the CPU."""

    device_config = CPU

    def __init__(self, raw: RawConfig) -> None:
        """Load the checkpoint and test it. Raises ``EngineError`` with the reason if it cannot be served."""
        try:
            with torch.inference_mode():
                self._open(raw)
        except Exception as error:  # code and files of any architecture, which may raise anything
            is_told = isinstance(error, EngineError | OSError | ValueError)
            reason = " ".join(str(error).split()) if is_told else f"transformers' code for it fails: {error!r}"
            raise EngineError(f"{raw.folder}: architecture {raw.architecture} is not supported: {reason}") from error

    def _open(self, raw: RawConfig) -> None:
        text = _load_config(raw)
        self._model = _load(raw, text)
        self._body = _find_layers(self._model)
        self._fixed_output: Any = None
        self._separate_head()
        vocab, context = int(text.vocab_size), _read_context(text)
        texts = [
            torch.randint(vocab, (cuts[-1],), generator=torch.Generator().manual_seed(0)) for cuts in _SELF_TEST_CUTS
        ]
        expected = [self._compute_own_logits(tokens) for tokens in texts]
        if _is_whole(raw, text):
            _drop_encoders(self._model, self._body)
        self.parameters = int(self._model.num_parameters())
        self._model.set_attn_implementation(NAME)
        self._mixers = wrap_mixers(self._body)
        self.config = ModelConfig(
            architecture=raw.architecture,
            vocab_size=vocab,
            hidden_size=int(text.hidden_size),
            max_context=context,
            num_labels=0,
            eos=raw.eos,
            extra=raw.extra,
            attention=self._trace(texts[0], context),
            num_layers=int(text.num_hidden_layers),
            states=list_states(self._mixers),
        )
        try:
            self._self_test(texts, expected)
        except EngineError:
            if not self._mixers:
                raise
            for mixer in self._mixers:
                mixer.is_sequential = True
            self._self_test(texts, expected)

    def forward(self, batch: Batch, attend: AttentionBackend, keep: KeepState | None = None) -> Tensor:
        with handle_attention(PagedAttentionHandler(attend)), use_states(batch.states):
            return self._hidden(batch, keep)

    def embed(self, tokens: Tensor) -> Tensor:
        table: Tensor = self._model.get_input_embeddings().weight
        return table[tokens]

    def compute_logits(self, hidden: Tensor, token_ids: Sequence[int] = ()) -> Tensor:
        self._fixed_output = self._result(last_hidden_state=hidden[None])
        try:
            unused = torch.zeros(1, len(hidden), dtype=torch.int64)
            # Some models make the masks of their layers outside of these.
            with handle_attention(PagedAttentionHandler(_refuse_attention)):
                logits: Tensor = self._model(input_ids=unused, use_cache=False).logits[0]
        finally:
            self._fixed_output = None
        return logits[:, list(token_ids)] if token_ids else logits

    def _separate_head(self) -> None:
        """Make the layers return ``self._fixed_output`` if it is set.

        What follows the layers (a head, a scale, a soft cap) can then be computed for some rows alone.
        """
        if self._body is self._model:
            raise EngineError("its head is not separate from its layers")
        compute = self._body.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return compute(*args, **kwargs) if self._fixed_output is None else self._fixed_output

        self._body.forward = forward

    def _hidden(self, batch: Batch, keep: KeepState | None = None) -> Tensor:
        options = {} if keep is None else {"output_hidden_states": True}
        inputs = {"input_ids": batch.tokens[None], "position_ids": batch.positions[None]}
        result = self._body(**inputs, use_cache=False, **options)
        self._result = type(result)
        hidden: Tensor = result.last_hidden_state[0]
        if keep is not None:
            for layer, states in enumerate(result.hidden_states[1:-1], 1):
                keep(layer, states[0])
        return hidden

    def _compute_own_logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self._model(input_ids=tokens[None], use_cache=False).logits[0]
        return logits

    def _trace(self, tokens: Tensor, context: int) -> tuple[LayerAttentionConfig, ...]:
        tracer = AttentionTracer(context)
        with handle_attention(tracer):
            self._hidden(Batch(tokens, torch.arange(len(tokens))))
        if not tracer.layers and not self._mixers:
            raise EngineError("its layers do not call attention through transformers' attention interface")
        return tuple(tracer.layers)

    def _self_test(self, texts: list[Tensor], expected: list[Tensor]) -> None:
        attend = DenseAttention(self.config.attention)
        logits: list[list[Tensor]] = [[] for _ in texts]
        states = [[torch.zeros(2 * len(texts), *shape) for shape in layer.shapes] for layer in self.config.states]
        for index, step in enumerate(zip(*(pairwise(cuts) for cuts in _SELF_TEST_CUTS), strict=True)):
            attend.num_tokens = [end - first for first, end in step]
            batch = Batch(
                torch.cat([text[first:end] for text, (first, end) in zip(texts, step, strict=True)]),
                torch.cat([torch.arange(first, end) for first, end in step]),
                states=StateStep(states, _alternate_slots(attend.num_tokens, index)),
            )
            rows = self.compute_logits(self.forward(batch, attend))
            for parts, part in zip(logits, torch.split(rows, attend.num_tokens), strict=True):
                parts.append(part)
        for parts, reference in zip(logits, expected, strict=True):
            ours = torch.cat(parts)
            if ours.shape != reference.shape or ours.shape[1] != self.config.vocab_size:
                raise EngineError(
                    f"its logits have {ours.shape[1]} columns, its vocab_size is {self.config.vocab_size}"
                )
            difference = (ours - reference).abs().max().item() / max(1.0, reference.abs().max().item())
            if not difference <= _TOLERANCE:
                raise EngineError(
                    f"computed in pieces over the paged cache, its logits differ by {difference:.1e} from its own; it "
                    "does something besides plain attention that is not known here"
                )


def _find_layers(model: Any) -> Any:
    """Return the module of a model that has its embeddings and layers."""
    layers = model.get_decoder()
    return getattr(model, "model", model) if layers is model else layers  # Llama 4 names no decoder


def _refuse_attention(*_: object, **__: object) -> Tensor:
    """Stand for the attention of a head, which has none."""
    raise EngineError("its head calls attention")


def _drop_encoders(model: Any, layers: Any) -> None:
    """Free the parts of a multimodal model that a text does not pass through: those beside its layers and its head."""
    kept = {layers, model.get_input_embeddings(), model.get_output_embeddings()}
    for holder in (model, getattr(model, "model", None)):
        for name, child in [] if holder is None else list(holder.named_children()):
            if kept.isdisjoint(child.modules()):
                setattr(holder, name, None)


def _alternate_slots(num_tokens: Sequence[int], index: int) -> list[StateSegment]:
    """Return the segments of a step of the self-test: each text reads one of its two slots and writes the other."""
    ends = list(accumulate(num_tokens))
    sources = [2 * row + index % 2 if index else NO_STATE for row in range(len(ends))]
    return [
        StateSegment(end - count, end, source, 2 * row + (index + 1) % 2)
        for row, (count, end, source) in enumerate(zip(num_tokens, ends, sources, strict=True))
    ]


def _read_context(config: Any) -> int:
    """Return the maximum number of tokens of a sequence; a recurrent model may set none."""
    context = getattr(config, "max_position_embeddings", None)
    return int(context) if context else _MAX_CONTEXT


def _load_config(raw: RawConfig) -> Any:
    """Return the config of the language model. Raises ``EngineError`` for what it rules out before weights are read."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(raw.folder, local_files_only=True, trust_remote_code=False)
    if getattr(config, "is_encoder_decoder", False):
        raise EngineError("is_encoder_decoder")
    if raw.wrapper is not None:
        config = config.get_text_config()
    loaded = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not _is_whole(raw, config) and (loaded is None or loaded.__name__ != raw.architecture):
        raise EngineError(
            "it is neither defined here nor a causal language model of transformers"
            if loaded is None
            else f"as a causal language model transformers would load {loaded.__name__}"
        )
    text = config.get_text_config()
    for name, feature in _REFUSED_FIELDS.items():
        if getattr(text, name, None):
            raise EngineError(f"{feature} ({name})")
    if getattr(text, "is_causal", True) is False:
        raise EngineError("attention that is not causal (is_causal)")
    if text.model_type in _ALIBI:
        raise EngineError(f"ALiBi position biases (model_type {text.model_type!r})")
    types = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
    if others := types - _KNOWN_LAYERS:
        raise EngineError(f"layers of type {', '.join(sorted(others))}")
    rope = getattr(text, "rope_parameters", None) or {}
    if "longrope" in {
        rope.get("rope_type"),
        *(part.get("rope_type") for part in rope.values() if isinstance(part, dict)),
    }:
        raise EngineError("rope scaling 'longrope', whose angles depend on the length of the text")
    for name in ("vocab_size", "num_hidden_layers"):
        if not isinstance(getattr(text, name, None), int):
            raise EngineError(f"its config has no {name}")
    return text


def _is_whole(raw: RawConfig, config: Any) -> bool:
    """Return True if a multimodal model is loaded as a whole, since there is no class for its language model alone.

    ``config``: of the language model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return raw.wrapper is not None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING


def _load(raw: RawConfig, config: Any) -> Any:
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    register()
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    of_folder = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    if raw.wrapper is None:
        model, report = AutoModelForCausalLM.from_pretrained(raw.folder, **options, **of_folder)
    elif _is_whole(raw, config):
        whole = getattr(transformers, raw.wrapper, None)
        if whole is None or not issubclass(whole, transformers.PreTrainedModel):
            raise EngineError("transformers has no such class")
        model, report = whole.from_pretrained(raw.folder, **options, **of_folder)
    else:
        weights = Weights(raw.folder, is_wrapped=True)
        tensors = {name: weights.take_raw(name, None) for name in weights.names()}
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, report = kind.from_pretrained(None, config=config, state_dict=tensors, **options)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise EngineError(f"{kind.removesuffix('_keys')} tensors: {', '.join(sorted(map(str, report[kind]))[:4])}")
    return model.eval()
