"""Tokens that a tokenizer has and the model has no embedding of, as Gemma 3 1B's token of pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.protocol.types import EngineError
from engine.text.tokenizer import Tokenizer
from tests.engine.conftest import save_random_model


def add_token(folder: Path, index: int) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": index, "content": "<image>", "special": True} | flags)
    path.write_text(json.dumps(content))


def test_an_added_token_without_an_embedding_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_random_model("LlamaForCausalLM", {}, tmp_path)
    before = Tokenizer(tmp_path, 400)
    size = len(before.encode("<image>"))
    # A tokenizer gives added tokens the ids behind its vocabulary, so that is where the model's must end.
    highest = max(json.loads(before.to_json())["model"]["vocab"].values())
    add_token(tmp_path, highest + 1)
    tokenizer = Tokenizer(tmp_path, highest + 1)
    assert "the model has no embedding of <image>" in caplog.text
    assert tokenizer.encode("a<image>b") == before.encode("a<image>b")
    assert len(tokenizer.encode("<image>")) == size > 1
    assert max(tokenizer.encode("<image>", special=True)) <= highest


def test_a_vocabulary_that_is_larger_without_added_tokens_is_refused(tmp_path: Path) -> None:
    save_random_model("LlamaForCausalLM", {}, tmp_path)
    with pytest.raises(EngineError, match=r"the tokenizer has token id .*, but the model's vocab_size is 100"):
        Tokenizer(tmp_path, 100)
