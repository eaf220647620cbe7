"""A broken ``config.json`` is named with its path, by everything that reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.models.config import read_raw_config
from engine.protocol.types import EngineError
from engine.remote.local_tokenizer import LocalTokenizer
from tests.engine.conftest import save_random_model


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "JSON"),
        (b"", "JSON"),
        (b"\xff\xfe{}", "JSON"),
        (b"[]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b'{"architectures": 5}', "architectures is 5; it must be a list of names"),
        (b'{"architectures": "LlamaForCausalLM"}', "it must be a list of names"),
    ],
)
def test_a_broken_config_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    save_random_model("LlamaForCausalLM", {}, tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    for read in (LocalTokenizer, read_raw_config):
        with pytest.raises(EngineError) as refusal:
            read(tmp_path)
        assert str(tmp_path / "config.json") in str(refusal.value)
        assert message in str(refusal.value)
