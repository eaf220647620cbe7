"""Tokenizers from GGUF metadata split texts as those that they were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import GemmaTokenizer

from engine.gguf.file import GgufModel
from engine.gguf.tokenizer import build_tokenizer, tokenizer_settings
from engine.protocol.types import EngineError

CORPUS = [
    "There are 2024 rolls, aren't there?\n\n  naïve café 12",
    "def f(x):\n    return x + 100\n",
    "你好 🙂 WORD Words",
]
TEXTS = st.text(alphabet="ab cR1 2\n'té.🙂你", max_size=40) | st.sampled_from(CORPUS)


def as_model(tokenizer: Tokenizer, **fields: Any) -> GgufModel:
    """Return the metadata that describes a trained tokenizer."""
    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    types = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED, None: gguf.TokenType.NORMAL}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    metadata = {
        "tokens": [token for token, _ in vocabulary],
        "token_type": np.array([int(types[added.get(token)]) for token, _ in vocabulary]),
        "merges": [" ".join(merge) for merge in merges],
    } | fields
    return GgufModel((Path("model.gguf"),), {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}, {})


def train(pre: Any) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_tokenizers_encode_and_decode_as_the_original(pre: str) -> None:
    original = train(SPLITS[pre])
    ours = build_tokenizer(as_model(original, model="gpt2", pre=pre))

    @given(st.lists(TEXTS | st.sampled_from(["<|end|>", "<tool>"]), max_size=4).map("".join))
    def check(text: str) -> None:
        expected = original.encode(text).ids
        assert ours.encode(text).ids == expected
        assert ours.decode(expected, skip_special_tokens=False) == original.decode(expected, skip_special_tokens=False)

    check()


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("gpt-4o", "word's WORD'S", ["word's", " WORD'S"]),  # contractions belong to words in either case
        ("qwen35", "हिन्दी", ["हिन्दी"]),  # and marks to their letters
        ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),
        ("smaug-bpe", "12345", ["123", "45"]),
        ("deepseek-coder", "a b12 你好!? x\n", ["a", " b", "1", "2", " ", "你好", "!?", " x", "\n"]),
        ("deepseek-llm", "a b12 你好!? x\n", ["a", " b", "12", " ", "你好", "!?", " x", "\n"]),
        ("deepseek-v3", "$12345 你好カナ!? _x\n", ["$", "123", "45", " ", "你好カナ", "!?", " _", "x", "\n"]),
        ("falcon", "a+b `c` 12345", ["a", "+", "b", " ", "`", "c", "`", " ", "123", "45"]),
        ("seed-coder", "a !?\n\nb12", ["a", " !?", "\n\n", "b", "1", "2"]),
        ("minicpm5", "a 12345 'S", ["a", " ", "123", "45", " '", "S"]),
        ("viking", "a, b12(c)", ["a", ",", " b", "1", "2", "(", "c", ")"]),
        ("minerva-7b", "a 123", ["a", " ", "1", "2", "3"]),
        ("glm4", "a 1234 'S", ["a", " ", "123", "4", " '", "S"]),
        ("mpt", "a 1234 'S", ["a", " 1234", " '", "S"]),
        ("llama4", "Word's 1234", ["Word's", " ", "123", "4"]),
        ("stablelm2", "a 12 'S", ["a", " ", "1", "2", " '", "S"]),
    ],
)
def test_texts_are_split_as_the_tokenizer_of_that_name_does(pre: str, text: str, parts: list[str]) -> None:
    """The parts are llama.cpp's."""
    ours = build_tokenizer(as_model(train(SPLITS["gpt-2"]), model="gpt2", pre=pre))
    assert ours.pre_tokenizer is not None
    spans = [span for _, span in ours.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == parts


def test_sentencepiece_tokens_merge_in_the_order_of_their_scores() -> None:
    """The original's merges are in the order of training, which is the order of SentencePiece's scores."""
    original = Tokenizer(BPE(fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    replace = normalizers.Replace(" ", "▁")
    original.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    original.decoder = decoders.Sequence(steps)
    bytes_of = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<unk>", *bytes_of])
    original.train_from_iterator(CORPUS[:1] * 3, trainer)
    model = as_model(original, model="llama", unknown_token_id=0, add_bos_token=False)
    tokens = model.metadata["tokenizer.ggml.tokens"]
    types = model.metadata["tokenizer.ggml.token_type"]
    for index in range(257):
        types[index] = int(gguf.TokenType.UNKNOWN if index == 0 else gguf.TokenType.BYTE)
    model.metadata["tokenizer.ggml.scores"] = -np.arange(len(tokens), dtype=np.float32)
    # The trained tokenizer took its bytes for special tokens, so it is built anew from its own model.
    rebuilt = Tokenizer(original.model)
    rebuilt.normalizer, rebuilt.decoder = original.normalizer, original.decoder
    ours = build_tokenizer(model)
    for text in [*CORPUS, "rolls rolls", "a", " a  b"]:
        assert ours.encode(text).ids == rebuilt.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == rebuilt.decode(rebuilt.encode(text).ids) == text


def test_gemma_4s_tokens_merge_in_the_order_of_its_merges() -> None:
    """The original is transformers' tokenizer with the same vocabulary."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trained = Tokenizer(BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=400))
    own = json.loads(trained.to_str())["model"]
    bytes_of = [f"<0x{value:02X}>" for value in range(256)]
    tokens = [*special, *bytes_of, *sorted(own["vocab"], key=own["vocab"].__getitem__)]
    merges = [tuple(merge) for merge in own["merges"]]
    original = GemmaTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    kinds = [gguf.TokenType.CONTROL] * 5 + [gguf.TokenType.BYTE] * 256
    types = np.array([int(kind) for kind in kinds] + [int(gguf.TokenType.NORMAL)] * (len(tokens) - 261))
    fields = {"model": "gemma4", "tokens": tokens, "token_type": types, "merges": [" ".join(one) for one in merges]}
    ids = {"padding_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "unknown_token_id": 3, "add_bos_token": False}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in (fields | ids).items()}
    ours = build_tokenizer(GgufModel((Path("model.gguf"),), metadata, {}))
    for text in [*CORPUS, "rolls  rolls\n\n", "a", " a  b", "<eos>x", "ж"]:
        expected = original.encode(text, add_special_tokens=False)
        assert ours.encode(text).ids == [2, *expected]
        assert ours.decode(expected, skip_special_tokens=False) == original.decode(expected) == text


def test_bos_is_added_where_the_file_says_so() -> None:
    original = train(SPLITS["gpt-2"])
    end = original.token_to_id("<|end|>")
    ours = build_tokenizer(as_model(original, model="gpt2", pre="gpt-2", bos_token_id=end, add_bos_token=True))
    assert ours.encode("a").ids == [end, *original.encode("a").ids]
    assert ours.encode("a", add_special_tokens=False).ids == original.encode("a").ids


def test_settings_name_the_special_tokens_and_hold_the_template() -> None:
    model = as_model(train(SPLITS["gpt-2"]), model="gpt2", eos_token_id=1)
    model.metadata["tokenizer.chat_template"] = "{{ messages }}"
    read = tokenizer_settings(model)
    assert read["eos_token"] == model.metadata["tokenizer.ggml.tokens"][1]
    assert read["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "t5"}, "tokenizer 't5' is not supported; supported are 'gpt2', 'llama' and 'gemma4'"),
        (
            {"model": "gpt2", "pre": "unheard"},
            r"pre 'unheard' is not supported; supported are default, gpt-2",
        ),
        ({"model": "gpt2", "tokens": ["a", "a"]}, "has a token twice"),
        ({"model": "gpt2", "merges": ["x y"]}, "has no valid tokenizer"),
        ({"model": "gpt2", "merges": ["xy"]}, "has no valid tokenizer"),
        ({"model": "gpt2", "bos_token_id": 10_000, "add_bos_token": True}, "bos_token_id is 10000, no token"),
        ({"model": "llama"}, r"lacks the field tokenizer\.ggml\.scores"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        build_tokenizer(as_model(train(SPLITS["gpt-2"]), **fields))
