"""Decide which tokens of a GGUF vocabulary end a generation, and which are added to a text, as llama.cpp does.

A file names a few of them; the others are known by their texts alone.
(https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.gguf.file import GgufModel, refuse_wrong_types
from engine.gguf.splittings import SPLITTINGS
from engine.protocol.types import EngineError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens that matter here."""

GEMMA4 = "gemma4"
"""Name of the tokenizer of Gemma 4, which begins every text with BOS."""
_END_TEXTS = frozenset(
    {"</s>", "<eos>", "[EOS]", "[e~[", "<EOT>", "_<EOT>", "[EOT]", "<end_of_turn>", "<turn|>", "<end_of_utterance>"}
    | {f"<|{name}|>" for name in ("eot_id", "eom_id", "im_end", "end", "endoftext", "end_of_text")}
    | {f"<|{name}|>" for name in ("return", "call", "calls", "flush")}
    | {"<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>"}
)
"""Texts of tokens that end a generation, whatever their type says."""

_FILL_TEXTS: dict[str, tuple[str, ...]] = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<|code_prefix|>", "<|prefix|>", "<PRE>", "▁<PRE>"),
        "<\uff5cfim\u2581begin\uff5c>",
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<|code_suffix|>", "<|suffix|>", "<SUF>", "▁<SUF>"),
        "<\uff5cfim\u2581hole\uff5c>",
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<|code_middle|>", "<|middle|>", "<MID>", "▁<MID>"),
        "<\uff5cfim\u2581end\uff5c>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Texts of the tokens that fill a gap in code; the first that a vocabulary has is the one, unless the file names it."""
_DEPRECATED_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_ENDING_FILLS = ("fim_pad", "fim_rep", "fim_sep")

_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
"""Special tokens of a SentencePiece vocabulary whose file does not name them."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of a vocabulary."""

    ids: dict[str, int]
    """Token ids by the names ``bos``, ``eos``, ``unknown``, ``padding``, as far as the vocabulary has them."""
    ends: tuple[int, ...]
    """Tokens that end a generation, the file's own eos token first."""
    types: npt.NDArray[Any]
    """The type of each token; those known by their texts are special even where the file says otherwise."""
    adds_bos: bool
    adds_eos: bool
    warnings: tuple[str, ...]
    """Sentences on what the file leaves open."""


def read_special_tokens(model: GgufModel) -> SpecialTokens:
    """Read the special tokens. Raises ``EngineError`` if the vocabulary is missing or its fields do not fit it."""
    with refuse_wrong_types(model.paths[0]):
        return _Reader(model).read()


class _Reader:
    def __init__(self, model: GgufModel) -> None:
        self._path, self._metadata = model.paths[0], model.metadata
        self._tokens: list[str] = self._read_field("tokens")
        if self._tokens is None:
            raise EngineError(f"{self._path} lacks the field tokenizer.ggml.tokens")
        if len(set(self._tokens)) != len(self._tokens):
            raise EngineError(f"{self._path}: tokenizer.ggml.tokens has a token twice")
        types = self._read_field("token_type")
        self._types = np.full(len(self._tokens), NORMAL) if types is None else np.array(types)
        if len(self._types) != len(self._tokens):
            raise EngineError(f"{self._path}: {len(self._types)} token types for {len(self._tokens)} tokens")
        self._index = {text: index for index, text in enumerate(self._tokens)}

    def read(self) -> SpecialTokens:
        is_sentencepiece = self._read_field("model") == "llama"
        ids = dict(_SENTENCEPIECE_IDS) if is_sentencepiece else {}
        ids = {name: index for name, index in ids.items() if index < len(self._tokens)}
        ids |= {name: index for name in ("unknown", "bos", "eos") if (index := self._token_id(name)) is not None}
        padding = self._read_field("padding_token_id")
        if padding is not None and 0 <= padding < len(self._tokens):  # nothing is padded: any other is of no account
            ids["padding"] = int(padding)
        # Types change while the ends are found, so this comes first.
        ends = self._find_ends(ids.get("eos"))
        warnings = [] if ends else ["it names no token that ends a text, and has none that is known by its text"]
        splitting = SPLITTINGS.get(self._read_field("pre"))
        is_gemma4 = self._read_field("model") == GEMMA4
        adds = {"bos": is_sentencepiece or (splitting is not None and splitting.adds_bos), "eos": False}
        said = {name: self._read_field(f"add_{name}_token") for name in adds}
        adds |= {name: bool(value) for name, value in said.items() if value is not None}
        adds["bos"] |= is_gemma4  # whatever the file says, as some of the first files were wrong
        for name in adds.keys() - ids.keys():
            if adds[name]:
                warnings.append(f"texts should have a {name} token, but it names none: none is added")
                adds[name] = False
        return SpecialTokens(
            ids, ends, types=self._types, adds_bos=adds["bos"], adds_eos=adds["eos"], warnings=tuple(warnings)
        )

    def _find_ends(self, eos: int | None) -> tuple[int, ...]:
        named = [eos, self._token_id("eot"), self._token_id("eom"), *self._list_eos()]
        fills = self._find_fills()
        by_text = sorted(self._index[text] for text in _END_TEXTS & self._index.keys())
        self._types[by_text] = CONTROL
        ends = dict.fromkeys(
            token for token in (*named, *by_text, *(fills.get(name) for name in _ENDING_FILLS)) if token is not None
        )
        texts = {self._tokens[token] for token in ends}
        # Harmony's messages end with <|end|>, and its turns with the others: a turn has several messages.
        if {"<|call|>", "<|calls|>"} & texts and {"<|return|>", "<|flush|>"} & texts:
            self._leave_out("<|end|>", ends, USER_DEFINED)
        if "<|tool_response>" in texts:
            self._leave_out("</s>", ends, NORMAL)
        return tuple(ends)

    def _leave_out(self, text: str, ends: dict[int, None], kind: int) -> None:
        """Remove a token that in this vocabulary ends nothing, whatever its text says elsewhere."""
        token = self._index.get(text)
        if token in ends:
            del ends[token]
            self._types[token] = kind

    def _find_fills(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, texts in _FILL_TEXTS.items():
            named = self._token_id(_DEPRECATED_NAMES.get(name, name))
            named = self._token_id(name) if named is None else named
            if named is not None:
                found[name] = named
            elif known := [self._index[text] for text in texts if text in self._index]:
                found[name] = known[0]
                self._types[known[0]] = CONTROL
        return found

    def _list_eos(self) -> list[int]:
        """Return the tokens of ``eos_token_ids``, which Ollama writes."""
        value = self._read_field("eos_token_ids")
        return (
            [] if value is None else [self._check_token(int(token), "eos_token_ids") for token in np.atleast_1d(value)]
        )

    def _token_id(self, name: str) -> int | None:
        """Return the token that the file gives a name, such as ``bos``."""
        value = self._read_field(f"{name}_token_id")
        return None if value is None else self._check_token(int(value), f"{name}_token_id")

    def _check_token(self, token: int, field: str) -> int:
        if not 0 <= token < len(self._tokens):
            raise EngineError(
                f"{self._path}: tokenizer.ggml.{field} is {token}, no token: the vocabulary has {len(self._tokens)}"
            )
        return token

    def _read_field(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")
