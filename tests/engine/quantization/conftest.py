"""Texts for the bundled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # the tests on a GPU need no texts, nor the packages of the service that these need
    from benchmarks.quantization.texts import Text

POLICY = Path(__file__).parents[3] / "reasoner" / "bundled" / "policy"
VOCAB = 826


@pytest.fixture(scope="session")
def unseen() -> list[Text]:
    """Texts of held-out problems."""
    from benchmarks.quantization.texts import texts

    return texts(Tokenizer(POLICY, VOCAB), "heldout", 30)


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibration file of training problems."""
    from benchmarks.quantization.texts import texts

    path = tmp_path_factory.mktemp("calibration") / "texts.jsonl"
    seen = texts(Tokenizer(POLICY, VOCAB), "train", 30)
    path.write_text("".join(json.dumps({"text": one.text}) + "\n" for one in seen))
    return path
