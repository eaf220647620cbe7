"""A GGUF file without a chat template takes one from beside it, and the advice names the user's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.gguf.folder import open_gguf_folder
from engine.protocol.types import EngineError
from engine.remote.local_tokenizer import chat_template
from engine.text.tokenizer import Tokenizer
from reasoner.admission.model_checks import check_policy
from tests.engine.conftest import TEMPLATE, save_random_model
from tests.engine.gguf.files import write_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_random_model("LlamaForCausalLM", {}, tmp_path / "checkpoint")
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "llama")
    return tmp_path / "model.gguf"


def test_the_advice_names_the_users_file_and_what_to_put_beside_it(path: Path) -> None:
    with pytest.raises(EngineError) as refusal:
        check_policy(open_gguf_folder(path))
    message = str(refusal.value)
    assert message.startswith(f"{path} has no chat template")
    assert str(path.with_name("chat_template.jinja")) in message
    assert "cache" not in message


def test_a_template_beside_the_file_is_used_and_counts_more_than_the_files_own(path: Path) -> None:
    beside = path.with_name("chat_template.jinja")
    before = open_gguf_folder(path)
    beside.write_text(TEMPLATE)
    folder = open_gguf_folder(path)
    assert folder != before
    check_policy(folder)
    assert chat_template(folder) == TEMPLATE
    message = [{"role": "user", "content": "step one"}]
    tokenizer = Tokenizer(folder, 400)
    assert tokenizer.encode_chat(message) == tokenizer.encode("<|user|>step one<|end|><|assistant|>")
    write_gguf(path.with_name("checkpoint"), path, "llama", change=lambda writer: writer.add_chat_template("own"))
    assert chat_template(open_gguf_folder(path)) == TEMPLATE
    beside.unlink()
    assert chat_template(open_gguf_folder(path)) == "own"


def test_a_template_beside_the_file_that_does_not_end_is_refused_by_its_name(path: Path) -> None:
    beside = path.with_name("chat_template.jinja")
    beside.write_text("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    with pytest.raises(EngineError, match=r"chat_template\.jinja: it is no usable template"):
        open_gguf_folder(path)
    beside.write_bytes(b"\xff\xfe")
    with pytest.raises(EngineError, match=r"chat_template\.jinja cannot be read as a chat template"):
        open_gguf_folder(path)
