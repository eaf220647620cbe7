"""Let the layers of transformers' models that keep a state read and write the engine's slots.

Such layers get and set their state through transformers' cache object, which has one for each text of a batch. Here the
tokens of a step are one flat batch, so each call of such a layer is divided: texts with as many new tokens each are
computed together, over a cache object that holds copies of their states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.cache.state_layers import NO_STATE, StateLayer, StateSegment, StateStep
from engine.protocol.types import EngineError

_CACHE_METHODS = {"get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"}
_CACHE_ARGUMENTS = ("cache_params", "past_key_values")
_MAX_STATES = 8
"""Most states of a kind that a layer may have."""

_CURRENT: ContextVar[StateStep | None] = ContextVar("states", default=None)
"""The states of the current forward pass; ``None`` while their shapes are being recorded."""


class _Part(NamedTuple):
    """A tensor of a layer's state: its name in transformers' cache layer, and its number there."""

    name: str
    number: int
    shape: tuple[int, ...]


@contextmanager
def use_states(step: StateStep | None) -> Iterator[None]:
    """Let all layers that are called in the block use the states of a step."""
    token = _CURRENT.set(step)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@dataclass(eq=False)
class _Mixer:
    """A module that keeps a state."""

    index: int
    """Its place among those of the model."""
    layer: int
    """Its place in transformers' cache."""
    compute: Callable[..., Any]
    signature: inspect.Signature
    cache_argument: str
    parts: tuple[_Part, ...] | None = None
    """The tensors of its state, once they are recorded."""
    is_sequential: bool = False
    """True to compute tokens that follow a state one by one: some code ignores the state of several tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a flat batch ``[1, tokens, …]`` with the states of the current step."""
        step, given = _CURRENT.get(), self.signature.bind(*args, **kwargs)
        if step is None:
            return self._record(given)
        num_tokens, result = next(iter(given.arguments.values())).shape[1], None
        for group in self._divide(step.groups):
            rows = _Rows(group, num_tokens)
            cache = self._load(step, group)
            output = self._call(given, cache, rows.take)
            output = output[0] if isinstance(output, tuple) else output
            if result is None:
                result = output.new_empty(1, num_tokens, *output.shape[2:])
            rows.put(output, result)
            self._store(step, group, cache)
        return result

    def _divide(self, groups: Iterable[list[StateSegment]]) -> Iterator[list[StateSegment]]:
        """Yield the groups to compute one after the other."""
        for group in groups:
            num_tokens = group[0].end - group[0].start
            if group[0].source == NO_STATE or not self.is_sequential:
                yield group
                continue
            for index in range(num_tokens):
                yield [
                    StateSegment(
                        one.start + index, one.start + index + 1, one.target if index else one.source, one.target
                    )
                    for one in group
                ]

    def _call(self, given: inspect.BoundArguments, cache: Any, take: Callable[[Any], Any]) -> Any:
        """Call the module with a cache layer, and with what ``take`` makes of each other argument."""
        args = [take(value) for value in given.args]
        kwargs = {name: take(value) for name, value in given.kwargs.items()}
        bound = self.signature.bind(*args, **kwargs)
        bound.arguments[self.cache_argument] = _wrap(cache, self.layer)
        return self.compute(*bound.args, **bound.kwargs)

    def _record(self, given: inspect.BoundArguments) -> Any:
        """Compute one text without a state, and record the shapes of the one that it leaves."""
        cache = _new_layer()
        result = self._call(given, cache, lambda value: value)
        if isinstance(result, tuple) and any(isinstance(other, Tensor) for other in result[1:]):
            raise EngineError("a layer with a state that has several results")
        self.parts = tuple(
            _Part(name, index, tuple(states[index].shape[1:]))
            for name, states in (("conv_states", cache.conv_states), ("recurrent_states", cache.recurrent_states))
            for index in states
            if states[index] is not None
        )
        return result

    def _load(self, step: StateStep, group: Sequence[StateSegment]) -> Any:
        """Return transformers' cache layer with copies of the states that a group of segments begins with."""
        cache = _new_layer()
        if group[0].source == NO_STATE:
            return cache
        sources = torch.tensor([segment.source for segment in group])
        assert self.parts is not None
        for part, tensor in zip(self.parts, step.layers[self.index], strict=True):
            getattr(cache, part.name)[part.number] = tensor[sources]
            getattr(cache, f"is_{part.name}_initialized")[part.number] = True
            cache.has_previous_state[part.number] = True
            if part.name == "conv_states":
                cache.conv_kernel_size[part.number] = part.shape[-1]
            cache.dtype, cache.device = tensor.dtype, tensor.device
        return cache

    def _store(self, step: StateStep, group: Sequence[StateSegment], cache: Any) -> None:
        targets = torch.tensor([segment.target for segment in group])
        assert self.parts is not None
        for part, tensor in zip(self.parts, step.layers[self.index], strict=True):
            tensor[targets] = getattr(cache, part.name)[part.number]


class _Rows:
    """The tokens of a group of segments of equal length, in a flat batch."""

    def __init__(self, group: Sequence[StateSegment], num_tokens: int) -> None:
        starts = torch.tensor([segment.start for segment in group])
        self._tokens = starts[:, None] + torch.arange(group[0].end - group[0].start)
        self._num_tokens = num_tokens

    def take(self, value: Any) -> Any:
        """Return the rows ``[segments, tokens, …]`` of a tensor ``[1, tokens, …]``; anything else as it is."""
        is_flat = isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, self._num_tokens)
        return value[0, self._tokens] if is_flat else value

    def put(self, output: Tensor, result: Tensor) -> None:
        """Write rows to their places in ``[1, tokens, …]``."""
        result[0, self._tokens] = output


def wrap_mixers(body: torch.nn.Module) -> list[_Mixer]:
    """Redirect the modules of a model that keep a state; return them in their order."""
    mixers: list[_Mixer] = []
    outer = ""
    for name, module in body.named_modules():
        if (outer and name.startswith(f"{outer}.")) or not _keeps_state(type(module)):
            continue
        signature = inspect.signature(module.forward)
        found = [argument for argument in _CACHE_ARGUMENTS if argument in signature.parameters]
        layer = getattr(module, "layer_idx", None)
        if not found or not isinstance(layer, int):
            raise EngineError(f"{type(module).__name__} keeps a state that it does not get as an argument")
        outer = name
        mixer = _Mixer(len(mixers), layer, compute=module.forward, signature=signature, cache_argument=found[0])
        module.forward = mixer.forward
        mixers.append(mixer)
    return mixers


def list_states(mixers: Sequence[_Mixer]) -> tuple[StateLayer, ...]:
    """Return the states of modules, whose shapes a forward pass has recorded."""
    return tuple(StateLayer(tuple(part.shape for part in mixer.parts or ())) for mixer in mixers)


def _keeps_state(kind: type[torch.nn.Module]) -> bool:
    """Return True if the code of a class gets or sets a state in transformers' cache."""
    methods = [inspect.unwrap(value) for value in vars(kind).values() if callable(value)]
    names = {name for method in methods for name in getattr(getattr(method, "__code__", None), "co_names", ())}
    return not names.isdisjoint(_CACHE_METHODS)


def _new_layer() -> Any:
    from transformers.cache_utils import LinearAttentionLayer

    return LinearAttentionLayer(number_of_states=_MAX_STATES)


def _wrap(layer: Any, index: int) -> Any:
    """Return transformers' cache in which every layer up to ``index`` is this one."""
    from transformers.cache_utils import Cache

    return Cache(layers=[layer] * (index + 1))
