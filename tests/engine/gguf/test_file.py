"""Files that are cut, changed or hostile are refused in one line."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.gguf.config import config_fields
from engine.gguf.file import read_gguf
from engine.gguf.paths import is_gguf
from engine.gguf.tokenizer import build_tokenizer
from engine.protocol.types import EngineError


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_types([1, 1, 3])
    writer.add_token_merges([])
    writer.add_eos_token_id(2)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("token_embd.weight", np.ones((3, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


def test_metadata_and_tensors_are_read(tmp_path: Path, content: bytes) -> None:
    model = read_gguf(write(tmp_path, content))
    assert model.metadata["tokenizer.ggml.tokens"] == ["a", "b", "c"]
    assert model.metadata["numbers"].tolist() == [1, 2, 3]
    assert {name: tensor.shape for name, tensor in model.tensors.items()} == {
        "token_embd.weight": (3, 32),
        "output_norm.weight": (32,),
    }
    assert np.frombuffer(model.tensors["output_norm.weight"].data, "<f4").tolist() == [1.0] * 32


@settings(
    max_examples=10 * settings.default.max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=2000,
)
@given(st.data())
def test_any_changed_header_is_read_or_refused(tmp_path: Path, content: bytes, data: st.DataObject) -> None:
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 1000))
        value = data.draw(st.sampled_from([b"\xff" * 8, b"\x00" * 8, struct.pack("<Q", 1 << 60), b"\x09\x00\x00\x00"]))
        size = data.draw(st.integers(1, len(value)))
        changed[at : at + size] = value[:size]
    cut = data.draw(st.one_of(st.none(), st.integers(1, len(changed))))
    path, messages = write(tmp_path, bytes(changed[:cut])), []
    for read in (read_gguf, lambda path: config_fields(read_gguf(path)), lambda path: build_tokenizer(read_gguf(path))):
        try:
            read(path)
        except EngineError as refusal:
            messages.append(str(refusal))
    assert all(str(path) in message and "\n" not in message for message in messages)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack("<I", 9), "version 9; supported are little-endian files of version 2 and 3"),
        (4, struct.pack(">I", 3), "big-endian"),
        (16, struct.pack("<Q", 1 << 60), "truncated"),
    ],
)
def test_a_wrong_header_is_explained(tmp_path: Path, content: bytes, at: int, value: bytes, message: str) -> None:
    path = write(tmp_path, content[:at] + value + content[at + len(value) :])
    with pytest.raises(EngineError, match=message):
        read_gguf(path)


def test_a_truncated_file_names_the_tensor(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content[:-200])
    with pytest.raises(EngineError, match=r"weight' ends at byte \d+, but the file has \d+: it is truncated"):
        read_gguf(path)


def test_a_missing_split_and_a_later_split_are_refused(tmp_path: Path, content: bytes) -> None:
    first = tmp_path / "m-00001-of-00002.gguf"
    first.write_bytes(content)
    with pytest.raises(EngineError, match=r"lacks m-00002-of-00002\.gguf: the model has 2 splits"):
        read_gguf(first)
    second = tmp_path / "m-00002-of-00002.gguf"
    second.write_bytes(content)
    with pytest.raises(EngineError, match=r"split 2 of 2; give the first, .*m-00001-of-00002\.gguf"):
        read_gguf(second)
    with pytest.raises(EngineError, match="of another split"):
        read_gguf(tmp_path)


def test_a_folder_with_several_models_is_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(content)
    assert is_gguf(tmp_path)
    with pytest.raises(EngineError, match=r"must hold one GGUF model, but has a\.gguf, b\.gguf"):
        read_gguf(tmp_path)


def test_an_architecture_that_is_not_supported_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content.replace(b"llama", b"mamba"))
    with pytest.raises(EngineError, match="the architecture 'mamba' is not supported; supported are llama, qwen2"):
        config_fields(read_gguf(path))
