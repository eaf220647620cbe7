"""Whatever a checkpoint's folder holds, loading it ends with an ``EngineError`` that names it, or with an engine."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.core.gpu_memory import NotEnoughMemory
from engine.core.load_errors import name_checkpoint
from engine.core.local_engine import LocalEngine
from engine.protocol.constraint import Constraint
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineError, GenerateRequest, InvalidRequest, SamplingParams
from tests.engine.conftest import Checkpoints, small_tokenizer
from tests.engine.helpers import Harness, generate

OPTIONS = EngineOptions(kv_tokens=512)


@pytest.fixture
def folder(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint to be spoilt."""
    return Path(shutil.copytree(checkpoints("llama"), tmp_path / "copy"))


def change(file: Path, **fields: Any) -> None:
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(values | fields))


def load(folder: Path) -> None:
    asyncio.run(LocalEngine({"m": folder}, OPTIONS).close())


def assert_loads_or_is_refused(folder: Path) -> None:
    """Check that loading raises nothing but ``EngineError``, in one line that names the folder."""
    refusal = ""
    try:
        load(folder)
    except EngineError as error:
        refusal = str(error)
    assert refusal == "" or str(folder) in refusal
    assert "\n" not in refusal


# End-of-sequence tokens.


@pytest.mark.parametrize("eos", [[0, 5000], [5000, 0], [0, -1], [0, 400], 10**12])
@pytest.mark.parametrize("speculates", [False, True])
def test_end_tokens_outside_of_the_vocabulary_are_ignored_with_a_warning(
    folder: Path, eos: Any, speculates: bool, caplog: pytest.LogCaptureFixture
) -> None:
    change(folder / "generation_config.json", eos_token_id=eos)
    with caplog.at_level(logging.WARNING):
        harness = Harness(folder, EngineOptions(kv_tokens=512, draft="ngram" if speculates else "off"))
    assert "outside of its vocabulary of 400" in caplog.text
    laws: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.2}, {"logit_bias": ((7, 1.0),)}, {"logprobs": 2}]
    for law in laws:
        [completion] = harness.complete(generate(range(5, 30), [Branch(1, 1, 12)], min_tokens=9, **law))
        assert len(completion.token_ids) >= 9
        assert 0 not in completion.token_ids[:9]


@pytest.mark.parametrize("eos", ["<|end|>", ["a"], [None], [[0]], True, 1.5, {}])
def test_an_end_token_that_is_no_id_is_refused(folder: Path, eos: Any) -> None:
    change(folder / "generation_config.json", eos_token_id=eos)
    with pytest.raises(EngineError, match=r"eos_token_id is .*it must be a token id"):
        load(folder)


def test_a_lifting_token_outside_of_the_vocabulary_is_refused(checkpoints: Checkpoints) -> None:
    request = GenerateRequest(
        *("r", "m", (5, 6), (Branch(1, 1, 3),), SamplingParams()),
        constraint=Constraint("regex", "[0-9]+"),
        constraint_escape_tokens=(5000,),
    )
    with pytest.raises(InvalidRequest, match="lifts_constraint has a token id outside 0 to 399"):
        Harness(checkpoints("llama")).submit(request)


# Files.

Spoil = Callable[[Path], Any]
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
DAMAGE: dict[str, Spoil] = {
    "empty": lambda file: file.write_bytes(b""),
    "a list": lambda file: file.write_text("[1]"),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\x00" * 9),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:40]),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a dangling link": lambda file: (file.unlink(), file.symlink_to("/nonexistent")),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_an_engine_error_or_has_no_influence(folder: Path, name: str, damage: str) -> None:
    DAMAGE[damage](folder / name)
    assert_loads_or_is_refused(folder)


VALUES = [None, "x", -1, 0, 1.5, [], [3], {}, True]
FIELDS = ["architectures", "hidden_size", "num_hidden_layers", "quantization_config", "rope_parameters", "model_type"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_the_wrong_kind_is_an_engine_error_or_has_no_influence(folder: Path, field: str) -> None:
    original = (folder / "config.json").read_text()
    for value in VALUES:
        (folder / "config.json").write_text(original)
        change(folder / "config.json", **{field: value})
        assert_loads_or_is_refused(folder)


@pytest.mark.parametrize("content", ["{}", "[1]", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_an_engine_error(folder: Path, content: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(EngineError, match=str(folder)):
        load(folder)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyError("b"), EngineError, r"/models/a holds no checkpoint .*KeyError: 'b'"),
        (PermissionError(13, "denied"), EngineError, "/models/a cannot be read"),
        (MemoryError(), NotEnoughMemory, "/models/a: there is not enough memory"),
        (OSError(12, "full"), NotEnoughMemory, "/models/a: there is not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), NotEnoughMemory, "not enough memory"),
    ],
)
def test_any_other_exception_names_the_checkpoint(error: Exception, kind: type[EngineError], message: str) -> None:
    with pytest.raises(kind, match=message), name_checkpoint(Path("/models/a")):
        raise error


# Multimodal models.

TEXT = {
    **{"vocab_size": 400, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"eos_token_id": 0, "pad_token_id": 1, "bos_token_id": 2},
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}


def make_wrapper(kind: str) -> tuple[str, Any]:
    """Return a class of transformers and a small config for it."""
    if kind == "gemma3":
        images = {"mm_tokens_per_image": 4, "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
        config = transformers.Gemma3Config(text_config=TEXT, vision_config=VISION, **images)
        return "Gemma3ForConditionalGeneration", config
    text = transformers.LlamaConfig(**TEXT)
    vision = transformers.CLIPVisionConfig(**VISION)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=5)
    return "LlavaForConditionalGeneration", config


@pytest.mark.parametrize("kind", ["gemma3", "llava"])
def test_a_damaged_part_that_is_not_the_language_model_is_not_read(tmp_path: Path, kind: str) -> None:
    """The tensors of an encoder may be missing or of any type."""
    architecture, config = make_wrapper(kind)
    getattr(transformers, architecture)(config).save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {
        name: tensor if "language_model" in name or name.startswith("lm_head") else torch.zeros(3, dtype=torch.int8)
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    load(tmp_path)


def test_a_completion_of_a_healthy_copy_is_still_served(folder: Path) -> None:
    [completion] = Harness(folder).complete(generate([5, 6], [Branch(1, 1, 3)], ignore_eos=True))
    assert isinstance(completion, Completion)
    assert len(completion.token_ids) == 3
