"""Build the tokenizer that a GGUF file describes: byte-level BPE (``gpt2``), or SentencePiece's BPE.

The merges of the latter follow from scores (``llama``) or are listed (``gemma4``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.gguf.file import GgufModel, refuse_wrong_types
from engine.gguf.special_tokens import CONTROL, GEMMA4, NORMAL, UNUSED, USER_DEFINED, SpecialTokens, read_special_tokens
from engine.gguf.splittings import SPLITTINGS
from engine.protocol.types import EngineError

_log = logging.getLogger(__name__)

_MOST_CUTS = 1 << 30
"""Characters that a search for SentencePiece's merges may copy; Gemma's 262,144 tokens need a hundredth of it."""
_SPACE = "▁"
_PHI3_KEEPING_SPACES = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Phi-3's special tokens behind which white space counts."""


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


def build_tokenizer(model: GgufModel) -> Tokenizer:
    """Return the tokenizer. Raises ``EngineError`` for a kind or a splitting that is not supported."""
    with refuse_wrong_types(model.paths[0]):
        return _build_tokenizer(model, _Vocabulary(model))


def _build_tokenizer(model: GgufModel, vocabulary: _Vocabulary) -> Tokenizer:
    kind, tokens = vocabulary.require("model"), vocabulary.require("tokens")
    special = read_special_tokens(model)
    # Unused tokens only fill the embedding table up.
    ids = {token: index for index, token in enumerate(tokens) if special.types[index] != UNUSED}
    if kind == "gpt2":
        tokenizer = _byte_level(vocabulary, ids)
    elif kind == "llama":
        merges = _find_merges(vocabulary, ids, special)
        tokenizer = _create_sentencepiece(vocabulary, ids, special, merges=merges)
    elif kind == GEMMA4:
        tokenizer = _create_sentencepiece(vocabulary, ids, special, merges=_read_merges(vocabulary))
    else:
        raise EngineError(
            f"{model.paths[0]}: the tokenizer {kind!r:.80} is not supported; supported are 'gpt2', 'llama' and 'gemma4'"
        )
    for warning in special.warnings:
        _log.warning("%s: %s", model.paths[0], warning)
    strips = _drops_spaces_after_special_tokens(model)
    for kind_of_token, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(text, normalized=False, special=is_special, rstrip=strips and text not in _PHI3_KEEPING_SPACES)
            for text in _of_type(tokens, special, kind_of_token)
        ]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)
    _add_bos_and_eos(tokenizer, tokens, special)
    return tokenizer


def tokenizer_settings(model: GgufModel) -> dict[str, Any]:
    """Return the fields of ``tokenizer_config.json``, with the chat template if there is one."""
    tokens, ids = _Vocabulary(model).require("tokens"), read_special_tokens(model).ids
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    settings = {f"{ours}_token": str(tokens[ids[theirs]]) for ours, theirs in names.items() if theirs in ids}
    template = model.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise EngineError(f"{model.paths[0]}: tokenizer.chat_template must be a text")
    return {name: value for name, value in (settings | {"chat_template": template}).items() if value is not None} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {},
    }


def _drops_spaces_after_special_tokens(model: GgufModel) -> bool:
    """Say whether white space behind a special token is dropped. Only the model's name tells Phi-3's tokens from
    others, which keep it; llama.cpp goes by it, too.
    """
    name = str(model.metadata.get("general.name", "")).lower()
    return "phi-3" in name or "phi3" in name


def _of_type(tokens: list[str], special: SpecialTokens, wanted: int) -> list[str]:
    return [token for token, kind in zip(tokens, special.types.tolist(), strict=True) if kind == wanted]


def _byte_level(vocabulary: _Vocabulary, ids: dict[str, int]) -> Tokenizer:
    path, name = vocabulary.model.paths[0], vocabulary.get("pre")
    if not name:
        _log.warning(
            "%s does not say how texts are split (tokenizer.ggml.pre): they are split as llama.cpp does by default, "
            "which need not be what the model was trained with; convert the model again",
            path,
        )
        name = "default"
    splitting = SPLITTINGS.get(name)
    if splitting is None:
        raise EngineError(
            f"{path}: the splitting tokenizer.ggml.pre {name!r:.80} is not supported; supported are "
            f"{', '.join(SPLITTINGS)}"
        )
    merges = _read_merges(vocabulary)
    tokenizer = _create_tokenizer(vocabulary, ids, merges, ignore_merges=splitting.keeps_whole_tokens)
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_merges(vocabulary: _Vocabulary) -> list[tuple[str, ...]]:
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.require("merges")]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise EngineError(f"{vocabulary.model.paths[0]} has no valid tokenizer: the merge {wrong!r:.80} is no pair")
    return merges


def _find_merges(vocabulary: _Vocabulary, ids: dict[str, int], special: SpecialTokens) -> list[tuple[str, ...]]:
    """SentencePiece's BPE merges the neighbours whose token has the best score: merges in the order of scores."""
    scores = vocabulary.require("scores")
    if len(scores) != len(special.types):
        raise EngineError(f"{vocabulary.model.paths[0]}: {len(scores)} scores for {len(special.types)} tokens")
    mergeable = {token for token, index in ids.items() if special.types[index] == NORMAL}
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
    return [(left, right) for *_, left, right in sorted(found)]


def _create_sentencepiece(
    vocabulary: _Vocabulary, ids: dict[str, int], special: SpecialTokens, merges: list[tuple[str, ...]]
) -> Tokenizer:
    unknown = special.ids.get("unknown")
    unk_token = None if unknown is None else str(vocabulary.require("tokens")[unknown])
    tokenizer = _create_tokenizer(vocabulary, ids, merges, fuse_unk=True, byte_fallback=True, unk_token=unk_token)
    has_prefix = bool(vocabulary.get("add_space_prefix", vocabulary.get("model") != GEMMA4))
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if has_prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _create_tokenizer(vocabulary: _Vocabulary, ids: dict[str, int], merges: list[Any], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(BPE(ids, merges, **options))
    except Exception as error:  # the library raises plain ``Exception``
        raise EngineError(f"{vocabulary.model.paths[0]} has no valid tokenizer: {error}") from None


def _add_bos_and_eos(tokenizer: Tokenizer, tokens: list[str], special: SpecialTokens) -> None:
    """Let the tokenizer begin and end every text with the tokens that the file asks for."""
    added = {"bos": special.adds_bos, "eos": special.adds_eos}
    texts = {name: str(tokens[special.ids[name]]) for name, is_added in added.items() if is_added}
    if texts:
        # As a list, since a token may have a colon, which a text would take for the mark of its type.
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([texts["bos"]] if "bos" in texts else []), "$A", *([texts["eos"]] if "eos" in texts else [])],
            special_tokens=[(text, special.ids[name]) for name, text in texts.items()],
        )
