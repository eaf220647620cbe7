"""Texts for the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.quantization.texts import Text, texts
from engine.text.tokenizer import Tokenizer

POLICY = Path(__file__).parents[3] / "reasoner" / "bundled" / "policy"
VOCAB = 826


@pytest.fixture(scope="session")
def unseen() -> list[Text]:
    """Texts of held-out problems."""
    return texts(Tokenizer(POLICY, VOCAB), "heldout", 30)


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibration file of training problems."""
    path = tmp_path_factory.mktemp("calibration") / "texts.jsonl"
    seen = texts(Tokenizer(POLICY, VOCAB), "train", 30)
    path.write_text("".join(json.dumps({"text": one.text}) + "\n" for one in seen))
    return path
