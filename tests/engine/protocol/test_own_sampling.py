"""The sampling parameters that a checkpoint or a GGUF file recommends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.gguf.config import generation_fields
from engine.gguf.file import GgufModel
from engine.models.config import read_raw_config
from engine.protocol.own_sampling import read_own_sampling
from engine.protocol.types import EngineError
from engine.remote.local_tokenizer import LocalTokenizer
from reasoner.jobs.sampling_spec import Sampling
from workers.config.types import require_model_folder


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8}, {"temperature": 0.7, "top_p": 0.8}),
        ({"do_sample": True, "temperature": None, "min_p": 0.05, "top_k": -1}, {"min_p": 0.05, "top_k": 0}),
        ({"do_sample": True, "top_p": 0}, {"top_p": 1.0, "top_k": 1}),
        ({"do_sample": False, "temperature": 0.7}, {}),
        ({"temperature": 0.7}, {}),
        ({}, {}),
    ],
)
def test_parameters_are_recommended_only_for_sampling(generation: dict[str, Any], expected: dict[str, float]) -> None:
    assert read_own_sampling(generation, "file") == expected


@pytest.mark.parametrize("change", [{"top_p": 3}, {"temperature": "hot"}, {"top_k": True}, {"min_p": -1}])
def test_a_value_out_of_range_is_refused_with_its_file_and_name(change: dict[str, Any]) -> None:
    [name] = change
    with pytest.raises(EngineError, match=rf"^generation_config.json: {name} is .*; it must be a number from"):
        read_own_sampling({"do_sample": True} | change, "generation_config.json")


def test_engine_and_local_tokenizer_read_the_file_of_a_checkpoint() -> None:
    folder = require_model_folder("policy", "model")
    assert read_raw_config(folder).sampling == LocalTokenizer(folder).sampling == {"temperature": 1.0}
    assert json.loads((folder / "generation_config.json").read_text())["do_sample"] is True


def test_a_gguf_file_recommends_its_general_sampling_fields() -> None:
    metadata = {"general.sampling.temp": np.float32(0.6).item(), "general.sampling.top_k": 20}
    vocabulary = {"tokenizer.ggml.tokens": ["a", "b", "c"], "tokenizer.ggml.eos_token_id": 2}
    model = GgufModel((Path("x.gguf"),), metadata | vocabulary, {})
    own = read_own_sampling(generation_fields(model), "x.gguf")
    assert own == {"temperature": 0.6, "top_k": 20}


def test_open_fields_alone_are_filled() -> None:
    filled = Sampling(temperature=0.0, max_tokens=9).fill({"temperature": 0.6, "top_k": 20})
    no_penalties = {"frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert filled == Sampling(temperature=0.0, top_p=1.0, top_k=20, min_p=0.0, max_tokens=9, **no_penalties)
