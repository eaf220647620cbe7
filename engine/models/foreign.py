"""Every other causal language model of transformers, run by its own code through the attention interface.

transformers lets a model's layers call an attention function by name. Ours hands queries, keys and values to the
engine's attention over the paged cache, so a step is one flat batch and transformers keeps no cache of its own.

Such code may do things that paged attention does not: position biases, attention sinks, layers that keep a state. What
shows in the calls is refused by name; whatever does not is found by a rehearsal when the model is loaded. Two texts are
computed side by side in pieces, as the engine would, and their logits must equal those of the model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.attention import Attend, LayerAttention
from engine.models.config import ModelConfig, RawConfig
from engine.models.model import Batch
from engine.types import EngineError

_NAME = "reasoner"
"""Our functions in transformers' registers."""
_TOLERANCE = 1e-4
"""Largest difference of logits in the rehearsal, relative to the largest logit where that exceeds 1."""
_REHEARSAL = ((0, 8, 9, 21), (0, 5, 14, 17))
"""Where each of the two texts is cut."""
_REFUSED_ARGUMENTS = {"s_aux": "attention sinks", "position_bias": "position biases", "alibi": "ALiBi"}
"""Arguments of attention functions that ours does not take, and what they mean."""
_REFUSED_FIELDS = {
    "alibi": "ALiBi position biases",
    "use_bidirectional_attention": "attention that is not causal",
    "state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "ssm_state_size": "state-space layers",
    "attention_window_size": "recurrent layers",
}
"""Fields of configs that mean what paged attention cannot do."""
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""What a config may name as the type of a layer."""
_ALIBI = ("bloom", "mpt")
"""Model types that have ALiBi without saying so."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class ForeignModel:
    """A ``Model`` whose layers are those of transformers. float32, CPU."""

    def __init__(self, raw: RawConfig) -> None:
        """Loads the checkpoint and rehearses it. Raises ``EngineError`` with the reason when it cannot be served."""
        try:
            with torch.inference_mode():
                self._open(raw)
        except Exception as error:  # code and files of any architecture, which may raise anything
            reason = str(error) if isinstance(error, EngineError | OSError | ValueError) else repr(error)
            raise EngineError(f"{raw.folder}: architecture {raw.architecture} is not supported: {reason}") from error

    def _open(self, raw: RawConfig) -> None:
        text = _load_config(raw)
        self._model = _load(raw)
        self._body = self._model.get_decoder()
        self._given: Any = None
        self._read_apart()
        vocab, context = int(text.vocab_size), int(text.max_position_embeddings)
        texts = [torch.randint(vocab, (cuts[-1],), generator=_generator()) for cuts in _REHEARSAL]
        expected = [self._alone(tokens) for tokens in texts]
        self._model.set_attn_implementation(_NAME)
        self.config = ModelConfig(
            architecture=raw.architecture,
            vocab=vocab,
            context=context,
            labels=0,
            eos=raw.eos,
            extra=raw.extra,
            attention=self._trace(texts[0], context),
        )
        self._rehearse(texts, expected)

    @property
    def parameters(self) -> int:
        """Number of weights, tied ones once."""
        return int(self._model.num_parameters())

    def forward(self, batch: Batch, attend: Attend) -> Tensor:
        """See ``Model``."""
        with _calls_go_to(_Paged(attend)):
            return self._hidden(batch)

    def read(self, hidden: Tensor, token_ids: Sequence[int] = ()) -> Tensor:
        """See ``Model``."""
        self._given = self._result(last_hidden_state=hidden[None])
        try:
            unused = torch.zeros(1, len(hidden), dtype=torch.int64)
            logits: Tensor = self._model(input_ids=unused, use_cache=False).logits[0]
        finally:
            self._given = None
        return logits[:, list(token_ids)] if token_ids else logits

    def _read_apart(self) -> None:
        """Makes the layers return ``self._given`` if there is one, so that what follows them (a head, a scale, a soft
        cap) can be computed for chosen rows."""
        if self._body is self._model:
            raise EngineError("its head is not apart from its layers")
        compute = self._body.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return compute(*args, **kwargs) if self._given is None else self._given

        self._body.forward = forward

    def _hidden(self, batch: Batch) -> Tensor:
        inputs = {"input_ids": batch.tokens[None], "position_ids": batch.positions[None], "use_cache": False}
        result = self._body(**inputs)
        self._result = type(result)
        hidden: Tensor = result.last_hidden_state[0]
        return hidden

    def _alone(self, tokens: Tensor) -> Tensor:
        """The model's own logits."""
        inputs = {"input_ids": tokens[None], "position_ids": torch.arange(len(tokens))[None], "use_cache": False}
        logits: Tensor = self._model(**inputs).logits[0]
        return logits

    def _trace(self, tokens: Tensor, context: int) -> tuple[LayerAttention, ...]:
        """What each layer asks of attention."""
        tracer = _Tracer(context)
        with _calls_go_to(tracer):
            self._hidden(Batch(tokens, torch.arange(len(tokens))))
        if not tracer.layers:
            raise EngineError("its layers do not call attention through transformers' attention interface")
        layers = int(self._body.config.num_hidden_layers)
        if len(tracer.layers) != layers:
            raise EngineError(f"{len(tracer.layers)} calls of attention in {layers} layers; each layer must have one")
        for name in ("heads", "kv_heads", "head_dim"):
            if len(found := {getattr(layer, name) for layer in tracer.layers}) > 1:
                raise EngineError(f"its layers differ in {name}: {sorted(found)}")
        return tuple(tracer.layers)

    def _rehearse(self, texts: list[Tensor], expected: list[Tensor]) -> None:
        attend = _Rehearsal(self.config.attention)
        logits: list[list[Tensor]] = [[] for _ in texts]
        for step in zip(*(pairwise(cuts) for cuts in _REHEARSAL), strict=True):
            attend.rows = list(step)
            batch = Batch(
                torch.cat([text[first:end] for text, (first, end) in zip(texts, step, strict=True)]),
                torch.cat([torch.arange(first, end) for first, end in step]),
            )
            rows = self.read(self.forward(batch, attend))
            for parts, part in zip(logits, torch.split(rows, [end - first for first, end in step]), strict=True):
                parts.append(part)
        for parts, right in zip(logits, expected, strict=True):
            ours = torch.cat(parts)
            if ours.shape != right.shape or ours.shape[1] != self.config.vocab:
                raise EngineError(f"its logits have {ours.shape[1]} columns, its vocab_size is {self.config.vocab}")
            difference = (ours - right).abs().max().item() / max(1.0, right.abs().max().item())
            if not difference <= _TOLERANCE:
                raise EngineError(
                    f"computed in pieces over the paged cache, its logits differ by {difference:.1e} from its own; it "
                    "does something besides plain attention that is not known here"
                )


class _Calls(Protocol):
    """Where a model's calls of attention go."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """``q``: ``[tokens, heads, head_dim]``, like ``Attend``."""
        ...

    def mask(self, visible: MaskFunction) -> Tensor | None:
        """What layers get as their mask."""
        ...


_CALLS: ContextVar[_Calls] = ContextVar("calls")


@contextmanager
def _calls_go_to(calls: _Calls) -> Iterator[None]:
    token = _CALLS.set(calls)
    try:
        yield
    finally:
        _CALLS.reset(token)


class _Paged:
    """One step: the layers' calls in their order go to the engine's attention, which knows what each layer needs."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._layer = 0

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:  # noqa: ARG002
        self._layer += 1
        return self._attend(self._layer - 1, q, k, v)

    def mask(self, visible: MaskFunction) -> Tensor | None:  # noqa: ARG002
        return None


class _Tracer:
    """Writes down what each call asks for. The answers do not matter."""

    def __init__(self, context: int) -> None:
        self.layers: list[LayerAttention] = []
        self._context = context

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        for name, feature in _REFUSED_ARGUMENTS.items():
            if options.get(name) is not None:
                raise EngineError(f"{feature} ({name})")
        tokens, heads, head_dim = q.shape
        if k.shape != v.shape or k.shape[0] != tokens or k.shape[2] != head_dim or heads % k.shape[1]:
            shapes = ", ".join(str(tuple(one.shape)) for one in (q, k, v))
            raise EngineError(f"attention of queries, keys and values of shapes {shapes}")
        if mask is None or options.get("is_causal") is False:
            raise EngineError("attention that is not causal")
        window, scale = int(mask.flatten()[0]), options.get("scaling")
        self.layers.append(
            LayerAttention(
                heads=heads,
                kv_heads=k.shape[1],
                head_dim=head_dim,
                scale=head_dim**-0.5 if scale is None else float(scale),
                window=window if window < self._context else None,
                softcap=options.get("softcap"),
            )
        )
        return torch.zeros_like(q).flatten(1)

    def mask(self, visible: MaskFunction) -> Tensor | None:
        """The window's length, in the shape of a mask."""
        return torch.full((1, 1, 1, 1), self._window(visible))

    def _window(self, visible: MaskFunction) -> int:
        """How many keys the last query of the longest sequence sees. Raises unless every query sees that many of the
        latest."""
        last, keys, zero = self._context - 1, torch.arange(self._context), torch.zeros((), dtype=torch.int64)

        def seen(query: int) -> Tensor:
            return visible(zero, zero, torch.tensor(query), keys).expand(self._context)

        window = int(seen(last).sum())
        for query in {0, 1, window - 1, window, window + 1, last // 3, last // 2, last // 2 + 1, last - 1, last}:
            if 0 <= query <= last and not torch.equal(seen(query), (keys <= query) & (keys > query - window)):
                raise EngineError("a mask that is neither causal nor a sliding window, such as chunked attention")
        return window


class _Rehearsal:
    """``Attend`` without pages, for the two texts of the rehearsal."""

    def __init__(self, layers: Sequence[LayerAttention]) -> None:
        self.rows: list[tuple[int, int]] = []
        """First and end position of each text in this step."""
        self._layers = layers
        self._cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = [end - first for first, end in self.rows]
        parts = zip(self.rows, *(torch.split(one, sizes) for one in (q, k, v)), strict=True)
        answers = []
        for row, ((first, _), queries, new_keys, new_values) in enumerate(parts):
            keys, values = self._cache.get((layer, row), (k[:0], v[:0]))
            keys, values = torch.cat((keys, new_keys)), torch.cat((values, new_values))
            self._cache[layer, row] = keys, values
            answers.append(_dense(self._layers[layer], queries, keys, values, first))
        return torch.cat(answers)


def _dense(about: LayerAttention, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """Attention of queries from position ``first`` on to all keys, written out."""
    k, v = (one.repeat_interleave(about.heads // about.kv_heads, dim=1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * about.scale
    if about.softcap is not None:
        scores = torch.tanh(scores / about.softcap) * about.softcap
    distance = torch.arange(first, first + len(q))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) | (distance >= (about.window or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1)


def _attention(
    _: object, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: ``[1, heads, tokens, head_dim]`` in, ``[1, tokens, heads, head_dim]`` out."""
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    return _CALLS.get().attention(q, k, v, attention_mask, options).view(1, *q.shape), None


def _mask(*, mask_function: MaskFunction, **_: Any) -> Tensor | None:
    """transformers' mask function."""
    return _CALLS.get().mask(mask_function)


def _load_config(raw: RawConfig) -> Any:
    """The config of the language model. Refuses what can be told before weights are read."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(raw.folder, local_files_only=True, trust_remote_code=False)
    if getattr(config, "is_encoder_decoder", False):
        raise EngineError("is_encoder_decoder")
    loaded = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if loaded is None or loaded.__name__ != raw.architecture:
        raise EngineError(
            "it is neither defined here nor a causal language model of transformers"
            if loaded is None
            else f"as a causal language model transformers would load {loaded.__name__}"
        )
    text = config.get_text_config()
    for name, feature in _REFUSED_FIELDS.items():
        if getattr(text, name, None):
            raise EngineError(f"{feature} ({name})")
    if text.model_type in _ALIBI:
        raise EngineError(f"ALiBi position biases (model_type {text.model_type!r})")
    types = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
    if others := types - _PLAIN_LAYERS:
        raise EngineError(f"layers of type {', '.join(sorted(others))}")
    rope = getattr(text, "rope_parameters", None) or {}
    if "longrope" in {rope.get("rope_type"), *(one.get("rope_type") for one in rope.values() if isinstance(one, dict))}:
        raise EngineError("rope scaling 'longrope', whose angles depend on the length of the text")
    for name in ("vocab_size", "num_hidden_layers", "max_position_embeddings"):
        if not isinstance(getattr(text, name, None), int):
            raise EngineError(f"its config has no {name}")
    return text


def _load(raw: RawConfig) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    model, report = AutoModelForCausalLM.from_pretrained(
        raw.folder,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise EngineError(f"{kind.removesuffix('_keys')} tensors: {', '.join(sorted(map(str, report[kind]))[:4])}")
    return model.eval()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
