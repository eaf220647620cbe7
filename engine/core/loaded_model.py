"""A loaded checkpoint, which turns requests into sequences."""

from __future__ import annotations

import logging
import math
from collections import abc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from torch import Tensor

from engine.adapters.checkpoint import Adapter
from engine.adapters.config import CONFIG_FILE
from engine.adapters.invocation import Invocation
from engine.attention.layer import Span
from engine.cache.page_drops import PageDrops, find_key_bound
from engine.fingerprint import fingerprint
from engine.gguf.folder import weight_files
from engine.models.by_transformers.model import TransformersModel
from engine.models.config import read_raw_config
from engine.models.interface import Model
from engine.protocol.options import EngineOptions
from engine.protocol.request_checks import check_generate, check_score, check_tokens, require_ids
from engine.protocol.types import (
    Branch,
    Capability,
    EngineError,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    ScoreItem,
    ScoreRequest,
)
from engine.runner.batch import ScheduledSequence
from engine.runner.probe import ProbeReader, load_probe
from engine.sampling.grammar import Grammar, GrammarCompiler
from engine.sampling.logits_processors import Penalties
from engine.scheduler.sequence import GenerateSequence, Request, ScoreSequence, Sequence
from engine.text.detokenizer import StopStrings, TextReader, decode_complete_text, find_incomplete_end
from engine.text.tokenizer import Tokenizer
from kernels.linear.low_rank import NO_ADAPTER

_log = logging.getLogger(__name__)

Positions = tuple[int, ...]

_STOPS = 256
"""Maximum number of cached lists of stop strings."""


class LoadedModel:
    """Weights, tokenizer and limits of one model. Its methods may be called from any thread."""

    def __init__(
        self,
        name: str,
        folder: Path,
        model: Model,
        options: EngineOptions,
        *,
        max_tokens: int,
        template: str | None = None,
    ) -> None:
        """Load the tokenizer in ``folder`` and the probe; raise ``EngineError`` with the reason if one is invalid.

        ``max_tokens`` bounds the context. ``template`` takes the place of the checkpoint's chat template.
        """
        self.config = config = model.config
        self.decoder = model
        gguf = weight_files(folder)
        mark = fingerprint(folder, gguf)
        self.probe = load_probe(options.probe, folder, gguf=gguf, config=config, fingerprint=mark)
        self.tokenizer = Tokenizer(folder, config.vocab_size, template)
        self.info = ModelInfo(
            id=name,
            kind="classify" if config.num_labels else "generate",
            context=min(config.max_context, max_tokens),
            vocab_size=config.vocab_size,
            parameters=model.parameters,
            architecture=config.architecture,
            bos=self.tokenizer.bos,
            extra=config.extra,
            sampling=read_raw_config(folder).sampling,
            fingerprint=mark,
            probe=None if self.probe is None else self.probe.info,
            chat_template=self.tokenizer.chat_template,
            page_size=options.page_size,
            capabilities=frozenset(Capability) - (frozenset() if self._can_drop_pages() else {Capability.KV_BUDGET}),
        )
        self.adapters: dict[str, ModelInfo] = {}
        """Properties of the model with each of its adapters, by the adapter's name."""
        self.invocations: dict[str, Invocation] = {}
        """The adapters' indices and the tokens that activate them, by name."""
        self._eos = self._select_eos()
        self._max_sequences = options.max_waiting
        self._page_size = options.page_size
        # Requests of one search have the same stop strings; the analysis of their tokens is cached.
        self._stop_strings = lru_cache(_STOPS)(partial(StopStrings, self.tokenizer))
        self._grammars = GrammarCompiler(self.tokenizer.to_json, config.vocab_size, self._eos)

    def add_adapters(self, adapters: abc.Sequence[Adapter]) -> None:
        """Serve adapters that the weights have. Raises ``EngineError`` if an invocation is not of this vocabulary."""
        for index, adapter in enumerate(adapters):
            tokens = adapter.config.invocation_tokens
            if any(not 0 <= token < self.info.vocab_size for token in tokens):
                raise EngineError(
                    f"adapter {adapter.name!r} is of another base: its alora_invocation_tokens {list(tokens)} are not "
                    f"all in this model's vocabulary of {self.info.vocab_size}"
                )
            self.invocations[adapter.name] = Invocation(adapter.name, index, tokens)
            self.adapters[adapter.name] = replace(
                self.info,
                id=adapter.name,
                parent=self.info.id,
                invocation=tokens,
                extra=adapter.extra,
                parameters=self.info.parameters + adapter.parameters,
                fingerprint=self.info.fingerprint and fingerprint(adapter.folder, config=CONFIG_FILE),
                probe=None,  # which was fitted on states that adapters change
            )

    def _can_drop_pages(self) -> bool:
        """Return True if tokens may lose keys before them: layers that count or choose positions would see others, and
        states have seen all."""
        own = not isinstance(self.decoder, TransformersModel)
        layers = self.config.attention
        return (
            own and not self.config.states and all(layer.indexer is None and layer.span == Span() for layer in layers)
        )

    def _find_adapter(self, model: str, tokens: abc.Sequence[int], field: str) -> tuple[int, int]:
        """Return the index of the adapter that a request names as its model, and where it begins in these tokens."""
        invocation = self.invocations.get(model)
        return (NO_ADAPTER, 0) if invocation is None else (invocation.index, invocation.find_start(tokens, field))

    def _select_eos(self) -> frozenset[int]:
        """Return the end-of-sequence tokens of the checkpoint that its model can sample."""
        named = {*self.config.eos, *(() if self.tokenizer.eos is None else (self.tokenizer.eos,))}
        valid = frozenset(token for token in named if 0 <= token < self.config.vocab_size)
        if others := sorted(named - valid):
            _log.warning(
                "model %s: the end-of-sequence tokens %s are outside of its vocabulary of %d: they are ignored",
                self.info.id,
                others,
                self.config.vocab_size,
            )
        return valid

    def add_branches(self, request: GenerateRequest, in_flight: Request) -> None:
        """Add a sequence for each branch of a request. Raises ``InvalidRequest``."""
        check_generate(request, self.adapters.get(request.model, self.info), self._max_sequences)
        prompt, sampling = require_ids(request.prompt, "prompt"), request.sampling
        stops = self._stop_strings(sampling.stop) if sampling.stop else None
        eos = frozenset() if sampling.ignore_eos else self._eos
        penalties = Penalties(sampling, prompt) if Penalties.is_needed(sampling) else None
        forbidden = None
        if sampling.min_tokens:
            forbidden = np.array(sorted(eos | set(sampling.stop_token_ids)), np.int64)
            if len(forbidden) == self.info.vocab_size:
                raise InvalidRequest(
                    "stop tokens are the whole vocabulary: none can be sampled before min_tokens", "stop_token_ids"
                )
        before = find_incomplete_end(self.tokenizer, prompt)
        adapter_index, adapter_start = self._find_adapter(request.model, prompt, "prompt")
        for index, branch in enumerate(request.branches):
            written = list(require_ids(branch.generated, "branches.generated"))
            tokens, seed = [*prompt, *written], _to_signed(branch.seed)
            start = len(decode_complete_text(self.tokenizer, written, before)) if written else 0
            in_flight.sequences.append(
                GenerateSequence(
                    request=in_flight,
                    index=index,
                    tokens=tokens,
                    num_prefix_tokens=len(tokens),
                    branch=branch,
                    seed=seed,
                    key=_to_signed(branch.key),
                    sampling=sampling,
                    eos=eos,
                    stop_strings=stops,
                    reader=TextReader(self.tokenizer, written, before),
                    generated=written,
                    text_start=start,
                    num_chars_searched=start,
                    num_chars_sent=start,
                    penalties=None if penalties is None else penalties.fork(written),
                    forbidden=forbidden,
                    grammar=self._start_grammar(request, branch, tokens),
                    logprobs=None if sampling.logprobs is None else [],
                    prompt_logprobs=None if sampling.prompt_logprobs is None or index > 0 else [None],
                    prompt_len=len(prompt),
                    adapter_index=adapter_index,
                    adapter_start=adapter_start,
                    is_probed=request.probe,
                    drops=PageDrops.of(find_key_bound(sampling, len(prompt), seed), tokens, self._page_size),
                )
            )

    def _start_grammar(self, request: GenerateRequest, branch: Branch, tokens: list[int]) -> Grammar | None:
        """Return the branch's position in the language of the request's constraint; ``None`` if it has none."""
        if request.constraint is None:
            return None
        start = len(request.prompt) if branch.constraint_start is None else branch.constraint_start
        lifts = frozenset(require_ids(request.constraint_escape_tokens, "lifts_constraint"))
        return self._grammars.start(request.constraint, tokens[start:], lifts)

    def add_items(self, request: ScoreRequest, in_flight: Request) -> None:
        """Add a sequence for each item of a request. Raises ``InvalidRequest``."""
        check_score(request, self.adapters.get(request.model, self.info), self._max_sequences)
        for index, item in enumerate(request.items):
            tokens, reads = self._flatten(item)
            adapter_index, adapter_start = self._find_adapter(request.model, tokens, "items")
            in_flight.sequences.append(
                ScoreSequence(
                    request=in_flight,
                    index=index,
                    tokens=tokens,
                    num_prefix_tokens=len(tokens),
                    read_positions=reads,
                    token_ids=require_ids(request.token_ids),
                    max_compute=math.inf if request.max_compute is None else request.max_compute,
                    adapter_index=adapter_index,
                    adapter_start=adapter_start,
                    is_probed=request.probe,
                    is_normalized=request.normalized,
                    drops=PageDrops.of(item.key_bound, tokens, self._page_size),
                )
            )

    def probed_layers(self, sequences: Iterable[Sequence]) -> frozenset[int]:
        """Return the layers whose hidden states the probe needs after a step of these sequences."""
        if self.probe is None or not any(sequence.is_probed for sequence in sequences):
            return frozenset()
        return frozenset(self.probe.layers) - {self.config.num_layers}

    def create_probe_reader(
        self,
        kept: Mapping[int, Tensor],
        hidden: Tensor,
        rows: abc.Sequence[int] | None,
        scheduled: Iterable[ScheduledSequence],
    ) -> ProbeReader | None:
        """Return the probe over a step's hidden states; ``None`` if there is no probe, or no sequence to probe."""
        if self.probe is None or not any(sequence.is_probed for sequence, *_ in scheduled):
            return None
        layers, scale = self.config.num_layers, self.config.hidden_scale
        return ProbeReader(self.probe, kept=kept, hidden=hidden, rows=rows, num_layers=layers, hidden_scale=scale)

    def _flatten(self, item: ScoreItem) -> tuple[list[int], Positions]:
        """Return an item's tokens up to the last position to score, and the positions to score."""
        tokens: list[int] = []
        ends: list[int] = []
        for part in item.parts:
            if isinstance(part, str):
                self.tokenizer.check_length(part, self.info.context, "items.parts")
                tokens.extend(self.tokenizer.encode_part(part))
            else:
                tokens.extend(check_tokens(part, self.info, "items.parts"))
            ends.append(len(tokens) - 1)
        reads = tuple(ends[part] for part in item.read)
        if min(reads) < 0:
            raise InvalidRequest("a part to read has no token at or before its end", "items.read")
        length = max(reads) + 1
        if length > self.info.context:
            raise InvalidRequest(f"an item has {length} tokens; at most {self.info.context} fit", "items.parts")
        return tokens[:length], reads


def _to_signed(word: int) -> int:
    """Return the int64 with the bits of a 64-bit word."""
    return word - (1 << 64) if word >> 63 == 1 else word
