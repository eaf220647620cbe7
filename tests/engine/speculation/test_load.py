"""Loading of the drafter that an option selects, and options that are rejected."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.core.engine_core import EngineCore
from engine.protocol.types import EngineError
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import SMALL
from tests.engine.speculation.dflash_heads import dflash_parts
from tests.engine.speculation.eagle3_heads import eagle3_parts
from tests.engine.speculation.heads import eagle_parts, medusa_parts, save_head


def kind(folder: Path, wanted: str) -> str | None:
    speculator = EngineCore("m", folder, replace(SMALL, draft=wanted)).runner.speculator
    return None if speculator is None else speculator.drafter.kind


def test_every_form_of_the_option_loads_its_drafter(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints("qwen3")
    medusa = save_head(tmp_path / "medusa", *medusa_parts())
    eagle = save_head(tmp_path / "eagle", *eagle_parts())
    eagle3 = save_head(tmp_path / "eagle3", *eagle3_parts())
    dflash = save_head(tmp_path / "dflash", *dflash_parts())
    forms = {
        "off": None,
        "ngram": "ngram",
        "auto": "ngram",
        f"draft_model={checkpoints('llama')}": "draft_model",
        f"medusa={medusa}": "medusa",
        f"eagle={eagle}": "eagle",
        f"eagle3={eagle3}": "eagle3",
        f"dflash={dflash}": "dflash",
    }
    assert {wanted: kind(folder, wanted) for wanted in forms} == forms


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_the_pool_size_includes_the_layer_of_an_eagle_head(checkpoints: Checkpoints, tmp_path: Path, form: str) -> None:
    """By default the pool has 1 GiB, the head's layer included."""
    folder = checkpoints("qwen3")
    head = save_head(tmp_path / "head", *{"eagle": eagle_parts, "eagle3": eagle3_parts}[form]())
    pools = {}
    for wanted in ("off", f"{form}={head}"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.core.model_setup._DEFAULT_KV_BYTES", 1 << 20)
            core = EngineCore("m", folder, replace(SMALL, draft=wanted, kv_tokens=None))
        pools[wanted] = core.cache.data
    plain, guessing = pools.values()
    assert guessing.shape[0] == plain.shape[0] + 1
    assert guessing.nbytes <= 1 << 20 < guessing.nbytes + guessing[:, :, :, 0].nbytes


def test_auto_loads_the_draft_model_that_the_checkpoint_names(checkpoints: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(checkpoints("qwen3"), tmp_path / "large")
    shutil.copytree(checkpoints("llama"), tmp_path / "small")
    (tmp_path / "large" / "drafter").mkdir()
    named = tmp_path / "large" / "drafter" / "config.json"
    named.write_text(json.dumps({"kind": "draft_model", "folder": "../../small"}))
    assert kind(tmp_path / "large", "auto") == "draft_model"
    named.write_text(json.dumps({"kind": "draft_model", "folder": "../../none"}))
    with pytest.raises(EngineError, match="none"):
        kind(tmp_path / "large", "auto")


def test_auto_loads_the_heads_in_the_checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints("qwen3"), folder)
    for parts, expected in ((eagle_parts, "eagle"), (eagle3_parts, "eagle3")):
        save_head(folder / "drafter", *parts())
        assert kind(folder, "auto") == expected
    assert kind(folder, "off") is None


def test_a_bundled_draft_model_loads_and_an_unknown_kind_is_rejected(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints("qwen3"), folder)
    shutil.copytree(checkpoints("llama"), folder / "drafter")
    assert kind(folder, "auto") == "draft_model"
    (folder / "drafter" / "config.json").write_text('{"kind": "hydra"}')
    with pytest.raises(EngineError, match=r"no drafter of kind 'hydra', which .*drafter says it is"):
        kind(folder, "auto")


def test_a_classifier_has_no_drafter(checkpoints: Checkpoints) -> None:
    assert kind(checkpoints("qwen3_classify"), "ngram") is None


def test_a_transformers_model_can_be_target_and_draft_model(checkpoints: Checkpoints) -> None:
    assert kind(checkpoints("gpt2"), "auto") == "ngram"
    assert kind(checkpoints("gpt2"), f"draft_model={checkpoints('gpt2')}") == "draft_model"


@pytest.mark.parametrize("wanted", ["", "eagles", "ngram=3", "off=1", "auto=x", "medusa", "medusa=", "draft_model"])
def test_an_unknown_form_is_rejected_with_the_known_ones(checkpoints: Checkpoints, wanted: str) -> None:
    with pytest.raises(EngineError, match="use one of: auto, off, ngram, mtp, draft_model=FOLDER"):
        kind(checkpoints("qwen3"), wanted)


def test_a_draft_model_must_have_the_targets_vocabulary(checkpoints: Checkpoints, tmp_path: Path) -> None:
    other = small_vocabulary(checkpoints("llama"), tmp_path)
    with pytest.raises(EngineError, match="vocab_size is 399, but the target model's is 400"):
        kind(checkpoints("qwen3"), f"draft_model={other}")


def test_a_classifier_is_rejected_as_draft_model(checkpoints: Checkpoints) -> None:
    with pytest.raises(EngineError, match="classifier; a draft model must generate"):
        kind(checkpoints("qwen3"), f"draft_model={checkpoints('llama_classify')}")


@pytest.mark.parametrize("length", [0, 17])
def test_a_draft_length_beyond_the_cap_is_rejected_with_both_numbers(checkpoints: Checkpoints, length: int) -> None:
    with pytest.raises(EngineError, match=f"a draft length of {length} is not between 1 and 16"):
        EngineCore("m", checkpoints("qwen3"), replace(SMALL, draft="ngram", draft_length=length))


def test_an_eagle3_head_as_eagle_is_rejected_with_the_right_option(checkpoints: Checkpoints, tmp_path: Path) -> None:
    head = save_head(tmp_path, *eagle3_parts())
    with pytest.raises(EngineError, match=f"{head} is an EAGLE-3 head; use eagle3={head}"):
        kind(checkpoints("qwen3"), f"eagle={head}")


def test_heads_of_another_width_are_rejected_with_both_numbers(checkpoints: Checkpoints, tmp_path: Path) -> None:
    config, tensors = medusa_parts()
    head = save_head(tmp_path / "medusa", config | {"hidden_size": 64}, tensors)
    with pytest.raises(EngineError, match="hidden_size is 64, but the target model's is 48"):
        kind(checkpoints("qwen3"), f"medusa={head}")


def small_vocabulary(folder: Path, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint whose vocabulary lacks its last token."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 1}))
    tensors = load_file(copy / "model.safetensors")
    whole = config["vocab_size"]
    cut = {name: one[:-1].clone() if one.shape[0] == whole else one for name, one in tensors.items()}
    save_file(cut, copy / "model.safetensors", metadata={"format": "pt"})
    return copy
