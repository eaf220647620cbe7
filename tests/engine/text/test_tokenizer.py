"""Prompts, chat templates and special tokens, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from engine.protocol.types import EngineError, InvalidRequest
from engine.remote.local_tokenizer import LocalTokenizer
from engine.text.tokenizer import LONG_TEXT, Tokenizer
from tests.engine.conftest import TEMPLATE, small_tokenizer

MESSAGES = [{"role": "user", "content": "add 3 and 4"}]
BOS = "<|user|>"
"""An existing token in the role of BOS."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tokenizer that adds BOS to a text, and whose template contains BOS too, as Llama's does."""
    tokenizer = small_tokenizer()
    tokenizer.bos_token = BOS
    special = [(BOS, tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=special),
        ]
    )
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_long_texts_are_tokenized_like_short_ones(folder: Path) -> None:
    tokenizer = Tokenizer(folder, 400)
    sentence, count = "add 3 and 4, then stop.\n", 1 + LONG_TEXT // 20
    assert tokenizer.encode(sentence * count) == tokenizer.encode(sentence) * count
    assert tokenizer.encode_prompt(sentence * count)[1:] == tokenizer.encode(sentence) * count


def test_a_chat_has_one_bos_token(folder: Path) -> None:
    ours = Tokenizer(folder, 400).encode_chat(MESSAGES)
    theirs: Any = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert list(ours) == theirs
    first = Tokenizer(folder, 400).encode(BOS)
    assert ours[:1] == first
    assert ours.count(*first) == 2  # and the one of the user's turn


def test_a_prompt_gets_bos_unless_it_begins_with_it(folder: Path) -> None:
    tokenizer = Tokenizer(folder, 400)
    plain, [first] = tokenizer.encode("add 3"), tokenizer.encode(BOS)
    assert list(tokenizer.encode_prompt("add 3")) == AutoTokenizer.from_pretrained(folder)("add 3")["input_ids"]
    assert tokenizer.encode_prompt("add 3") == (first, *plain)
    assert tokenizer.encode_prompt(f"{BOS}add 3") == (first, *plain)


def test_a_template_may_be_a_file_or_a_field_or_missing(folder: Path) -> None:
    expected = Tokenizer(folder, 400).encode_chat(MESSAGES)
    file = folder / "chat_template.jinja"
    template = file.read_text()
    file.unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(folder, 400).encode_chat(MESSAGES)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    assert Tokenizer(folder, 400).encode_chat(MESSAGES) == expected


def test_messages_refused_by_the_template_raise_an_invalid_request(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        Tokenizer(folder, 400).encode_chat(MESSAGES)


def test_a_tokenizer_with_ids_beyond_the_embedding_is_refused(folder: Path) -> None:
    largest = max(AutoTokenizer.from_pretrained(folder).get_vocab().values())
    Tokenizer(folder, largest + 1)
    with pytest.raises(EngineError, match=rf"token id {largest}, but the model's vocab_size is {largest}"):
        Tokenizer(folder, largest)


def test_variables_of_the_chat_template_reach_it(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if enable_thinking %}a{% else %}b{% endif %}")
    tokenizer, local = Tokenizer(folder, 400), LocalTokenizer(folder)
    for is_on, text in ((True, "a"), (False, "b")):
        variables = {"enable_thinking": is_on}
        assert tokenizer.encode_chat(MESSAGES, template_kwargs=variables) == tokenizer.encode(text)
        assert local.chat(MESSAGES, template_kwargs=variables) == text
    with pytest.raises(InvalidRequest, match="'tokenize' is set by the engine"):
        tokenizer.encode_chat(MESSAGES, template_kwargs={"tokenize": True})
