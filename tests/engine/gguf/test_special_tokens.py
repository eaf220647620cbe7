"""Which tokens end a generation and which begin a text, as llama.cpp decides for the same vocabularies.

The expected values are what llama.cpp's server says of such files: its list of EOG tokens, and its ``/tokenize``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import TokenType

from engine.gguf.config import generation_fields
from engine.gguf.file import GgufModel
from engine.gguf.folder import open_gguf_folder
from engine.gguf.special_tokens import read_special_tokens
from engine.gguf.splittings import SPLITTINGS
from engine.gguf.tokenizer import build_tokenizer
from engine.models.config import read_raw_config
from engine.protocol.types import EngineError
from tests.engine.conftest import save_random_model
from tests.engine.gguf.files import write_gguf

BASE = ["a", "b", "l", "o", "h", "e", "he", "ll", "hell", "hello"]
MERGES = ["h e", "l l", "he ll", "hell o"]
NORMAL, CONTROL, USER_DEFINED = TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED
FIRST_SPECIAL = len(BASE)
"""Token id of the first special token of a vocabulary."""


def byte_level(special: dict[str, int], pre: str | None = "gpt-2", **fields: Any) -> GgufModel:
    """Return a byte-level vocabulary that ends with these tokens, by their types."""
    return _vocabulary("gpt2", BASE, [NORMAL] * len(BASE), special, fields | {"merges": MERGES} | _named(pre))


def sentencepiece(special: dict[str, int], pre: str | None = None, **fields: Any) -> GgufModel:
    tokens = ["<unk>", "<s>", "</s>", "▁", *BASE, "▁hello"]
    types = [TokenType.UNKNOWN, CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 3)
    scores = -np.arange(len(tokens) + len(special), dtype=np.float32)
    return _vocabulary("llama", tokens, types, special, fields | {"scores": scores} | _named(pre))


def _named(pre: str | None) -> dict[str, Any]:
    return {} if pre is None else {"pre": pre}


def _vocabulary(
    model: str, tokens: list[str], types: list[Any], special: dict[str, int], fields: dict[str, Any]
) -> GgufModel:
    all_types = np.array([int(kind) for kind in (*types, *special.values())])
    fields = {"model": model, "tokens": [*tokens, *special], "token_type": all_types} | fields
    return GgufModel((Path("model.gguf"),), {f"tokenizer.ggml.{name}": value for name, value in fields.items()}, {})


def find_ends(model: GgufModel) -> set[str]:
    return {model.metadata["tokenizer.ggml.tokens"][token] for token in read_special_tokens(model).ends}


def test_phi_3_stops_at_the_end_of_a_turn_too() -> None:
    """The file names ``<|endoftext|>`` alone; a turn ends with ``<|end|>``."""
    special = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"]
    model = sentencepiece(dict.fromkeys(special, CONTROL), eos_token_id=15)
    assert find_ends(model) == {"<|endoftext|>", "<|end|>", "</s>"}
    assert generation_fields(model)["eos_token_id"] == [15, 2, 17]


ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
    *("</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED, TokenType.UNUSED])
@pytest.mark.parametrize("text", ENDS)
def test_a_token_that_is_known_by_its_text_ends_a_generation_whatever_its_type(text: str, kind: int) -> None:
    model = byte_level({"<x>": CONTROL, text: kind}, eos_token_id=FIRST_SPECIAL)
    assert read_special_tokens(model).ends == (FIRST_SPECIAL, FIRST_SPECIAL + 1)
    tokenizer = build_tokenizer(model)
    assert tokenizer.encode(f"a{text}b").ids == [0, FIRST_SPECIAL + 1, 1]
    assert tokenizer.decode([0, FIRST_SPECIAL + 1, 1]) == "ab"


@pytest.mark.parametrize(
    "text", ["<|fim_prefix|>", "<fim_middle>", "<\uff5cfim\u2581hole\uff5c>", "<|assistant|>", "<pad>", "eos"]
)
def test_other_special_tokens_end_nothing(text: str) -> None:
    assert find_ends(byte_level({"<x>": CONTROL, text: CONTROL}, eos_token_id=FIRST_SPECIAL)) == {"<x>"}


@pytest.mark.parametrize(
    ("special", "ends"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], {"<|return|>", "<|call|>"}),
        (["<|end|>", "<|return|>", "<|calls|>"], {"<|return|>", "<|calls|>"}),
        (["<|end|>", "<|flush|>", "<|calls|>"], {"<|flush|>", "<|calls|>"}),
        (["<|end|>", "<|flush|>", "<|return|>"], {"<|end|>", "<|flush|>", "<|return|>"}),
        (["</s>", "<|tool_response>"], {"<|tool_response>"}),
        (["[PAD]", "<|fim_pad|>"], {"<|fim_pad|>"}),
    ],
)
def test_a_token_ends_nothing_where_others_of_the_vocabulary_do(special: list[str], ends: set[str]) -> None:
    assert find_ends(byte_level(dict.fromkeys(special, CONTROL))) == ends
    # Also where the file calls it its own end.
    named = byte_level(dict.fromkeys(special, CONTROL), eos_token_id=FIRST_SPECIAL)
    assert find_ends(named) == (ends | {"[PAD]"} if special[0] == "[PAD]" else ends)


@pytest.mark.parametrize(
    ("name", "drops"), [("Phi3", True), ("Phi-3.5-mini-instruct", True), ("Phi-4", False), (None, False)]
)
def test_phi_3_drops_white_space_behind_its_special_tokens(name: str | None, drops: bool) -> None:
    """So do the tokenizers of Phi-3 as published, and llama.cpp for a file with that name."""
    special = {"<|endoftext|>": CONTROL, "<|user|>": CONTROL, "<|end|>": CONTROL, "<|tool|>": USER_DEFINED}
    model = sentencepiece(special, eos_token_id=15)
    if name is not None:
        model.metadata["general.name"] = name
    encode = build_tokenizer(model).encode
    for text in ("<|user|>", "<|end|>", "<|tool|>", "</s>"):
        is_equal = encode(f"{text} \n hello").ids == encode(f"{text}hello").ids
        assert is_equal is drops, text
    for text in ("<|endoftext|>", "<s>"):
        assert encode(f"{text} \n hello").ids != encode(f"{text}hello").ids


def test_all_ids_that_a_file_names_end_a_generation() -> None:
    """``eos_token_ids`` is what Ollama writes."""
    fields: dict[str, Any] = {
        "eos_token_id": 3,
        "eot_token_id": 5,
        "eom_token_id": 2,
        "eos_token_ids": np.array([3, 6, 7]),
    }
    fills: dict[str, Any] = {"fim_pad_token_id": 1, "fim_rep_token_id": 0, "fim_sep_token_id": 4, "fim_pre_token_id": 8}
    model = byte_level({"<|fim_pad|>": NORMAL}, **fields, **fills)
    assert read_special_tokens(model).ends == (3, 5, 2, 6, 7, 1, 0, 4)
    # The file names another token for its purpose, so this is an ordinary one.
    assert read_special_tokens(model).types[FIRST_SPECIAL] == NORMAL


@pytest.mark.parametrize("field", ["eos_token_id", "eot_token_id", "bos_token_id", "fim_pad_token_id"])
def test_an_id_outside_of_the_vocabulary_is_refused_by_name(field: str) -> None:
    ids: dict[str, Any] = {field: 99}
    with pytest.raises(EngineError, match=rf"model\.gguf: tokenizer\.ggml\.{field} is 99, no token: .* has 10"):
        read_special_tokens(byte_level({}, **ids))
    with pytest.raises(EngineError, match=r"tokenizer\.ggml\.eos_token_ids is 99"):
        read_special_tokens(byte_level({}, eos_token_ids=[1, 99]))


def test_padding_outside_of_the_vocabulary_is_of_no_account() -> None:
    assert "padding" not in read_special_tokens(byte_level({}, padding_token_id=4_294_967_295)).ids


ADDING_BOS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}


@pytest.mark.parametrize(
    ("pre", "begins"),
    [(name, name in ADDING_BOS) for name in SPLITTINGS],
)
def test_byte_level_texts_begin_with_bos_by_their_splitting(pre: str, begins: bool) -> None:
    special = {"<|begin_of_text|>": CONTROL, "<|x|>": CONTROL}
    ids: dict[str, Any] = {"bos_token_id": FIRST_SPECIAL, "eos_token_id": FIRST_SPECIAL + 1}
    bos = [FIRST_SPECIAL]
    assert build_tokenizer(byte_level(special, pre, **ids)).encode("hello").ids == (bos if begins else []) + [9]
    # What the file says counts more.
    for adds in (True, False):
        tokenizer = build_tokenizer(byte_level(special, pre, **ids, add_bos_token=adds))
        assert tokenizer.encode("hello").ids == (bos if adds else []) + [9]
    ending = build_tokenizer(byte_level(special, pre, **ids, add_bos_token=False, add_eos_token=True))
    assert ending.encode("hello").ids == [9, FIRST_SPECIAL + 1]


@pytest.mark.parametrize("pre", [None, "default"])
def test_sentencepiece_texts_begin_with_bos_whether_or_not_the_file_names_one(pre: str | None) -> None:
    for fields, expected in (
        ({}, [1, 14]),
        ({"bos_token_id": 3}, [3, 14]),
        ({"add_bos_token": False}, [14]),
        ({"add_eos_token": True}, [1, 14, 2]),
    ):
        assert build_tokenizer(sentencepiece({}, pre, **fields)).encode("hello").ids == expected
    assert find_ends(sentencepiece({}, pre)) == {"</s>"}


def test_without_a_splitting_the_default_one_is_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokens = [*map(chr, range(ord("0"), ord("9") + 1)), "12", "123", "+", "++", "+1"]
    fields: dict[str, Any] = {"tokens": tokens, "token_type": np.full(len(tokens), int(NORMAL))}
    fields |= {"merges": ["1 2", "12 3", "+ +", "+ 1"], "eos_token_id": 0}
    tokenizer = build_tokenizer(_replace(byte_level({}, None), fields))
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("model.gguf does not say how texts are split (tokenizer.ggml.pre)")
    # Digits in threes from the left, and signs by themselves: GPT-2's splitting does neither.
    encoded = tokenizer.encode("12312++1")
    assert encoded.tokens == ["123", "12", "++", "1"]
    assert encoded.ids == build_tokenizer(_replace(byte_level({}, "default"), fields)).encode("12312++1").ids
    assert len(caplog.records) == 1


def _replace(model: GgufModel, fields: dict[str, Any]) -> GgufModel:
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return GgufModel(model.paths, model.metadata | named, {})


def test_a_vocabulary_without_any_end_and_a_missing_bos_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = build_tokenizer(byte_level({}, "llama-bpe"))
    assert tokenizer.encode("hello").ids == [9]
    assert [record.getMessage().removeprefix("model.gguf: ") for record in caplog.records] == [
        "it names no token that ends a text, and has none that is known by its text",
        "texts should have a bos token, but it names none: none is added",
    ]


def test_the_folder_of_a_file_ends_sequences_at_all_of_its_ends(tmp_path: Path) -> None:
    save_random_model("LlamaForCausalLM", {}, tmp_path / "checkpoint")
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path / "checkpoint", path, "llama", change=lambda writer: writer.add_eos_token_id(7))
    raw = read_raw_config(open_gguf_folder(path))
    assert raw.eos == (7, 0)  # <|end|> has no type of its own there
