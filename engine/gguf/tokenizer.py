"""Build the tokenizer that a GGUF file describes: byte-level BPE (``gpt2``) or SentencePiece's BPE (``llama``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.gguf.file import GgufModel, refuse_wrong_types
from engine.protocol.types import EngineError

_MOST_CUTS = 1 << 30
"""Characters that a search for SentencePiece's merges may copy; Gemma's 262,144 tokens need a hundredth of it."""
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_SPACE = "▁"

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Splitting:
    """Splitting of a text before the merges."""

    pattern: str | None = None
    """Regular expression of the parts; ``None`` stands for GPT-2's."""
    single_digits: bool = False
    keeps_whole_tokens: bool = False
    """A part that is a token is not built from merges."""


_LLAMA3 = _Splitting(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", keeps_whole_tokens=True)
_QWEN2 = _Splitting(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}")
_SPLITTINGS = (
    dict.fromkeys(("gpt-2", "olmo", "phi-2", "granite-docling"), _Splitting())
    | dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), _LLAMA3)
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen", "qwen35"), _QWEN2)
    | dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _Splitting(single_digits=True))
    | {"dbrx": _Splitting(_LLAMA3.pattern), "smollm3": _LLAMA3}
    | {"tekken": _Splitting(rf"{_CASED}|\p{{N}}|{_CASED_REST}", keeps_whole_tokens=True)}
    | {"gpt-4o": _Splitting(rf"{_CASED}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_REST}")}
)
"""Splitting by ``tokenizer.ggml.pre``, a name that llama.cpp gives to the expression of each tokenizer."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The metadata ``tokenizer.ggml.*``."""

    model: GgufModel

    def get(self, name: str, default: Any = None) -> Any:
        return self.model.metadata.get(f"tokenizer.ggml.{name}", default)

    def require(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise EngineError(f"{self.model.paths[0]} lacks the field tokenizer.ggml.{name}")
        return value

    def token(self, name: str) -> str | None:
        """Return the text of a special token, such as ``bos``."""
        index, tokens = self.get(f"{name}_token_id"), self.require("tokens")
        if index is None:
            return None
        if not 0 <= index < len(tokens):
            raise EngineError(f"{self.model.paths[0]}: tokenizer.ggml.{name}_token_id is {index}, no token")
        return str(tokens[index])


def build_tokenizer(model: GgufModel) -> Tokenizer:
    """Return the tokenizer. Raises ``EngineError`` for a kind or a splitting that is not supported."""
    with refuse_wrong_types(model.paths[0]):
        return _build_tokenizer(model, _Vocabulary(model))


def _build_tokenizer(model: GgufModel, vocabulary: _Vocabulary) -> Tokenizer:
    kind, tokens = vocabulary.require("model"), vocabulary.require("tokens")
    if len(set(tokens)) != len(tokens):
        raise EngineError(f"{model.paths[0]}: tokenizer.ggml.tokens has a token twice")
    types = vocabulary.get("token_type", np.full(len(tokens), _NORMAL))
    if len(types) != len(tokens):
        raise EngineError(f"{model.paths[0]}: {len(types)} token types for {len(tokens)} tokens")
    # Unused tokens only fill the embedding table up.
    ids = {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED}
    if kind == "gpt2":
        tokenizer = _byte_level(vocabulary, ids)
    elif kind == "llama":
        tokenizer = _sentencepiece(vocabulary, ids, types)
    else:
        raise EngineError(
            f"{model.paths[0]}: the tokenizer {kind!r:.80} is not supported; supported are 'gpt2' and 'llama'"
        )
    special = [AddedToken(text, normalized=False, special=True) for text in _of_type(tokens, types, _CONTROL)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _of_type(tokens, types, _USER_DEFINED)])
    _add_bos(tokenizer, vocabulary, default=kind == "llama")
    return tokenizer


def tokenizer_settings(model: GgufModel) -> dict[str, Any]:
    """Return the fields of ``tokenizer_config.json``, with the chat template if there is one."""
    vocabulary = _Vocabulary(model)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    settings = {f"{ours}_token": vocabulary.token(theirs) for ours, theirs in names.items()}
    template = model.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise EngineError(f"{model.paths[0]}: tokenizer.chat_template must be a text")
    return {name: value for name, value in (settings | {"chat_template": template}).items() if value is not None} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {},
    }


def _of_type(tokens: list[str], types: Any, wanted: int) -> list[str]:
    return [token for token, kind in zip(tokens, types.tolist(), strict=True) if kind == wanted]


def _byte_level(vocabulary: _Vocabulary, ids: dict[str, int]) -> Tokenizer:
    name = vocabulary.get("pre", "gpt-2")
    splitting = _SPLITTINGS.get(name)
    if splitting is None:
        raise EngineError(
            f"{vocabulary.model.paths[0]}: the splitting tokenizer.ggml.pre {name!r:.80} is not supported; supported "
            f"are {', '.join(_SPLITTINGS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.require("merges")]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise EngineError(f"{vocabulary.model.paths[0]} has no valid tokenizer: the merge {wrong!r:.80} is no pair")
    tokenizer = _create(vocabulary, ids, merges, ignore_merges=splitting.keeps_whole_tokens)
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.single_digits else []
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary, ids: dict[str, int], types: Any) -> Tokenizer:
    """SentencePiece's BPE merges the neighbours whose token has the best score: merges in the order of scores."""
    scores = vocabulary.require("scores")
    if len(scores) != len(types):
        raise EngineError(f"{vocabulary.model.paths[0]}: {len(scores)} scores for {len(types)} tokens")
    mergeable = {token for token, index in ids.items() if types[index] == _NORMAL}
    if sum(len(token) ** 2 for token in mergeable) > _MOST_CUTS:
        longest = max(map(len, mergeable))
        raise EngineError(f"{vocabulary.model.paths[0]}: tokens of up to {longest} characters are too long to merge")
    found = []
    for token in mergeable:
        index = ids[token]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                found.append((-float(scores[index]), index, ids[left], ids[right], left, right))
    merges = [(left, right) for *_, left, right in sorted(found)]
    tokenizer = _create(
        vocabulary, ids, merges, fuse_unk=True, byte_fallback=True, unk_token=vocabulary.token("unknown")
    )
    has_prefix = bool(vocabulary.get("add_space_prefix", True))
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if has_prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _create(vocabulary: _Vocabulary, ids: dict[str, int], merges: list[Any], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(BPE(ids, merges, **options))
    except Exception as error:  # the library raises plain ``Exception``
        raise EngineError(f"{vocabulary.model.paths[0]} has no valid tokenizer: {error}") from None


def _add_bos(tokenizer: Tokenizer, vocabulary: _Vocabulary, *, default: bool) -> None:
    """Add the tokens that begin and end every text, if the file asks for them."""
    parts = ["$A"]
    specials = []
    for name, place, is_added in (("bos", 0, default), ("eos", 2, False)):
        text = vocabulary.token(name)
        if text is not None and vocabulary.get(f"add_{name}_token", is_added):
            parts.insert(place, text)
            specials.append((text, tokenizer.token_to_id(text)))
    if specials:
        tokenizer.post_processor = processors.TemplateProcessing(single=" ".join(parts), special_tokens=specials)
