"""Models whose metadata is hostile or wrong are refused in one line before anything is made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter

from engine.gguf.folder import open_gguf_folder
from engine.protocol.types import EngineError
from engine.remote.local_tokenizer import LocalTokenizer
from tests.engine.conftest import save_random_model
from tests.engine.gguf.files import write_gguf
from tests.long import mostly_long

Change = Callable[[GGUFWriter], None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_random_model("LlamaForCausalLM", {}, folder)
    return folder


def write(checkpoint: Path, tmp_path: Path, change: Change, name: str = "model.gguf") -> Path:
    write_gguf(checkpoint, tmp_path / name, "llama", change=change)
    return tmp_path / name


def refuse(path: Path) -> str:
    """Return the refusal, which names the file in one short line and leaves no folder behind."""
    with pytest.raises(EngineError) as refusal:
        open_gguf_folder(path)
    message = str(refusal.value)
    assert str(path.parent) in message
    assert "\n" not in message
    assert len(message) < 1000
    return message


ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops around an answer": "{% generation %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endgeneration %}",
    "a large power": "{{ 10 ** (10 ** 8) }}",
    "a text of 10 GB": "{{ 'x' * 10 ** 10 }}",
    "a wide text": "{{ 'x' | center(10 ** 10) }}",
    "a text that doubles": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}"
    "{% endfor %}",
    "macros that double": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}",
}


@pytest.mark.parametrize("case", mostly_long(ENDLESS, every=3))
def test_a_chat_template_that_does_not_end_is_refused(case: str, checkpoint: Path, tmp_path: Path) -> None:
    path = write(checkpoint, tmp_path, lambda writer: writer.add_chat_template(ENDLESS[case]))
    assert "tokenizer.chat_template is no usable template" in refuse(path)


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}{{ bos_token }}",
        "{{ messages | tojson(indent=2) }}{% for m in messages %}{% break %}{% endfor %}",
        "{{ undefined.field }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    ],
)
def test_a_template_that_ends_is_kept_also_if_it_refuses_messages(
    template: str, checkpoint: Path, tmp_path: Path
) -> None:
    path = write(checkpoint, tmp_path, lambda writer: writer.add_chat_template(template))
    assert LocalTokenizer(open_gguf_folder(path)).template == template


def add_uint32(name: str, value: int) -> Change:
    return lambda writer: writer.add_uint32(name, value)


WRONG: dict[str, tuple[Change, str]] = {
    "a number as template": (add_uint32("tokenizer.chat_template", 3), "tokenizer.chat_template must be a text"),
    "a text as token": (lambda writer: writer.add_string("tokenizer.ggml.bos_token_id", "x"), "wrong type or size"),
    "a token beyond the vocabulary": (lambda writer: writer.add_bos_token_id(1 << 31), "no token"),
    "a text as temperature": (lambda writer: writer.add_string("general.sampling.temp", "hot"), "wrong type or size"),
    "a list as number of tensors": (
        lambda writer: writer.add_array("split.tensors.count", [1, 2]),
        "wrong type or size",
    ),
    "another tokenizer": (lambda writer: _replace(writer, "tokenizer.ggml.model", "bert"), "the tokenizer 'bert'"),
    "a splitting of a megabyte": (
        lambda writer: _replace(writer, "tokenizer.ggml.pre", "x" * (1 << 20)),
        "supported are default, gpt-2",
    ),
    "another architecture": (lambda writer: _replace(writer, "general.architecture", "mamba"), "architecture 'mamba'"),
    "a billion layers": (lambda writer: _replace(writer, "llama.block_count", 1_000_000_000), "says 1000000000"),
    "no heads": (lambda writer: _replace(writer, "llama.attention.head_count", 0), "num_attention_heads follows as 0"),
    "no layers": (lambda writer: _replace(writer, "llama.block_count", 0), "says 0"),
    "merges without a pair": (lambda writer: _replace(writer, "tokenizer.ggml.merges", ["ab"]), "no valid tokenizer"),
    "merges of unknown tokens": (
        lambda writer: _replace(writer, "tokenizer.ggml.merges", ["\x01\x02 \x03"]),
        "no valid tokenizer",
    ),
    "types of other tokens": (lambda writer: _replace(writer, "tokenizer.ggml.token_type", [1]), "1 token types"),
}


def _replace(writer: GGUFWriter, name: str, value: str | int | list[int] | list[str]) -> None:
    writer.kv_data[0][name].value = value


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_field_is_named_in_one_line(case: str, checkpoint: Path, tmp_path: Path) -> None:
    change, message = WRONG[case]
    assert message in refuse(write(checkpoint, tmp_path, change))


def test_a_sentencepiece_token_of_a_megabyte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "x", "x" * (1 << 20)])
    writer.add_token_scores([0.0, -1.0, -2.0])
    writer.add_token_types([int(gguf.TokenType.UNKNOWN), 1, 1])
    writer.add_unk_token_id(0)
    for name, rows in (("token_embd.weight", 3), ("blk.0.attn_norm.weight", 1)):
        writer.add_tensor(name, np.ones((rows, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "tokens of up to 1048576 characters are too long to merge" in refuse(path)


def test_splits_of_another_count_or_order_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    def number(index: int, count: int) -> Change:
        def change(writer: GGUFWriter) -> None:
            writer.add_uint16("split.no", index)
            writer.add_uint16("split.count", count)

        return change

    first = write(checkpoint, tmp_path, number(1, 2), "m-00001-of-00002.gguf")
    write(checkpoint, tmp_path, number(0, 2), "m-00002-of-00002.gguf")
    assert "is split 2 of 2 in its metadata, which its name is not" in refuse(first)
    write(checkpoint, tmp_path, number(0, 3), "m-00001-of-00002.gguf")
    assert "is split 1 of 3 in its metadata" in refuse(first)


def test_a_name_of_megabytes_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = write(checkpoint, tmp_path, add_uint32("x" * (1 << 20), 1))
    assert "has 1048576 bytes; at most 65536 are allowed" in refuse(path)
