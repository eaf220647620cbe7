"""Probe scores: those of transformers' hidden states, whatever the step that computed them, and for no forward pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineError, GenerateRequest, InvalidRequest, ScoreItem
from engine.runner import forward_cpu
from engine.runner.probe import Probe
from engine.speculation.control.controller import FixedController
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import EmulatedGraph, emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate, score
from tests.engine.models.test_models import random_tokens
from tests.engine.probes import exact_scores, plant_probe
from tests.engine.speculation.stub_drafters import Oracle
from tests.engine.ties import assert_same_tokens
from tests.long import mostly_long_grid

PROMPT = tuple(random_tokens(21, 5))
BRANCHES = [Branch(3, key, 1 + 2 * (key % 16)) for key in range(32)]


def probed(folder: Path, probe: Path, **options: object) -> Harness:
    return Harness(folder, replace(SMALL, probe=str(probe), **options))  # type: ignore[arg-type]


def request(branches: Sequence[Branch] = BRANCHES, *, prompt: Sequence[int] = PROMPT) -> GenerateRequest:
    return replace(generate(prompt, branches, ignore_eos=True), probe=True)


@pytest.mark.parametrize(
    ("layers", "kind"),
    mostly_long_grid([(1,), (2,), (1, 2)], ["qwen3", "gemma2", "phi3", "mistral", "granite"], every=4),
)
def test_scores_are_those_of_the_same_head_on_the_hidden_states_of_transformers(
    checkpoints: Checkpoints, kind: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    folder = checkpoints(kind)
    probe = plant_probe(folder, tmp_path / "probe", layers, units=3 if layers == (2,) else 1)
    completions = probed(folder, tmp_path / "probe").complete(request())
    assert_scores_of_transformers(completions, folder, probe)


def test_a_model_that_transformers_runs_has_scores_of_its_inner_layers(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = checkpoints("olmo2")
    probe = plant_probe(folder, tmp_path / "probe", (1,))
    completions = probed(folder, tmp_path / "probe").complete(request())
    assert_scores_of_transformers(completions, folder, probe)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_asking_for_scores_changes_no_bit_of_what_is_sampled(
    checkpoints: Checkpoints, kind: str, tmp_path: Path
) -> None:
    plant_probe(checkpoints(kind), tmp_path / "probe")
    plain = probed(checkpoints(kind), tmp_path / "probe").complete(replace(request(), probe=False))
    asked = probed(checkpoints(kind), tmp_path / "probe").complete(request())
    assert [replace(one, probe=None) for one in asked] == plain
    assert all(completion.probe is None for completion in plain)


def test_scores_of_recorded_steps_are_those_of_steps_launched_kernel_by_kernel(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_probe(checkpoints("qwen3"), tmp_path / "probe")
    recorded = probed(checkpoints("qwen3"), tmp_path / "probe").complete(request())
    monkeypatch.setattr(forward_cpu, "_MAX_RECORDED_TOKENS", 0)
    assert probed(checkpoints("qwen3"), tmp_path / "probe").complete(request()) == recorded


@pytest.mark.parametrize("draft", ["off", "ngram"])
def test_deterministic_scores_are_the_same_bits_alone_in_a_batch_forked_and_resumed(
    checkpoints: Checkpoints, draft: str, tmp_path: Path
) -> None:
    plant_probe(checkpoints("qwen3"), tmp_path / "probe")
    harness = probed(checkpoints("qwen3"), tmp_path / "probe", deterministic=True, draft=draft)
    prompt = PROMPT + PROMPT  # of which n-grams draft something
    batch = harness.complete(request(prompt=prompt))
    for branch, whole in [*zip(BRANCHES, batch, strict=True)][1:16:3]:
        harness.core.clear_cache()
        [alone] = harness.complete(request([branch], prompt=prompt))
        assert (alone.token_ids, alone.probe) == (whole.token_ids, whole.probe)
        cut = branch.max_tokens // 2
        rest = replace(branch, max_tokens=branch.max_tokens - cut, generated=whole.token_ids[:cut])
        for clears in (False, True):  # a fork of the cached prefix, and a resumption without it
            if clears:
                harness.core.clear_cache()
            [continued] = harness.complete(request([rest], prompt=prompt))
            assert continued.probe == whole.probe
        tokens = prompt + whole.token_ids[:-1]
        [read] = harness.score(replace(score(ScoreItem((tokens,), (0,))), probe=True))
        assert read.values == ((whole.probe,),)
        assert read.computed_tokens == 1


@pytest.mark.parametrize("shape", [(4, 4), (3, 8)], ids=["chain", "tree"])
def test_scores_with_speculation_are_those_of_transformers(
    checkpoints: Checkpoints, shape: tuple[int, int], tmp_path: Path
) -> None:
    folder = checkpoints("qwen3")
    probe = plant_probe(folder, tmp_path / "probe")
    harness = probed(folder, tmp_path / "probe")
    plain = harness.complete(request())
    known = {
        (branch.seed, branch.key, len(PROMPT) + index): token
        for branch, completion in zip(BRANCHES, plain, strict=True)
        for index, token in enumerate(completion.token_ids)
    }
    harness.core.start_speculation(Oracle(known, 360, 0.8), FixedController(*shape))
    completions = harness.complete(request())
    assert sum(completion.accepted_tokens for completion in completions) > 100
    tokens, expected = ([completion.token_ids for completion in some] for some in (completions, plain))
    assert_same_tokens(folder, [request()], tokens, expected)
    assert_scores_of_transformers(completions, folder, probe)


def test_scores_on_the_gpu_are_those_of_transformers(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints("qwen3")
    probe = plant_probe(folder, tmp_path / "probe")
    emulate_gpu(monkeypatch)
    harness = probed(folder, tmp_path / "probe")
    completions = harness.complete(request())
    assert EmulatedGraph.replayed > 0
    assert_scores_of_transformers(completions, folder, probe)


def test_the_probe_beside_the_weights_is_loaded_unless_it_is_off(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_checkpoint(checkpoints("qwen3"), tmp_path)
    mark = Harness(folder).core.model.info.fingerprint
    probe = plant_probe(folder, folder / "probe")
    info = Harness(folder).core.model.info
    assert info.probe == probe.info
    assert (info.probe.layers, info.probe.parameters) == ((1, 2), 97)
    assert info.fingerprint == mark
    assert Harness(folder, replace(SMALL, probe="off")).core.model.info.probe is None


def test_requests_for_scores_without_a_probe_are_refused(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"))
    message = "has no probe; fit one with 'reasoner prm train --probe' and serve it with --probe"
    with pytest.raises(InvalidRequest, match=message):
        harness.submit(request())
    with pytest.raises(InvalidRequest, match=message):
        harness.submit(replace(score(ScoreItem((PROMPT,), (0,))), probe=True))


def test_a_probe_of_another_model_is_refused_with_both_fingerprints(checkpoints: Checkpoints, tmp_path: Path) -> None:
    other = plant_probe(checkpoints("llama"), tmp_path / "probe")
    with pytest.raises(EngineError, match="fit one with 'reasoner prm train --probe --base") as refusal:
        probed(checkpoints("qwen3"), tmp_path / "probe")
    assert other.fingerprint in str(refusal.value)
    assert Harness(checkpoints("qwen3")).core.model.info.fingerprint in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"layers": [3]}, r"layers are \[3\]; they must be from 1 to 2"),
        ({"layers": [1]}, "its tensors are"),
        ({"version": 9}, "version 9 of a probe is not known"),
    ],
)
def test_damaged_probes_are_refused(
    checkpoints: Checkpoints, damage: dict[str, object], message: str, tmp_path: Path
) -> None:
    plant_probe(checkpoints("qwen3"), tmp_path / "probe")
    settings = tmp_path / "probe" / "probe.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | damage))
    with pytest.raises(EngineError, match=message):
        probed(checkpoints("qwen3"), tmp_path / "probe")


def test_missing_files_of_a_probe_are_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"has no probe\.json: name a folder that 'reasoner prm train --probe' wrote"):
        probed(checkpoints("qwen3"), tmp_path)
    plant_probe(checkpoints("qwen3"), tmp_path / "probe")
    (tmp_path / "probe" / "probe.safetensors").write_bytes(b"no tensors")
    with pytest.raises(EngineError, match="not a readable safetensors file"):
        probed(checkpoints("qwen3"), tmp_path / "probe")


async def test_a_classifier_beside_the_policy_has_no_probe(checkpoints: Checkpoints, tmp_path: Path) -> None:
    plant_probe(checkpoints("qwen3"), tmp_path / "probe")
    options = EngineOptions(kv_tokens=1024, max_running=4, probe=str(tmp_path / "probe"))
    engine = LocalEngine({"m": checkpoints("qwen3"), "prm": checkpoints("qwen3_classify")}, options)
    try:
        policy, prm = await engine.models()
        assert policy.probe is not None
        assert prm.probe is None
    finally:
        await engine.close()


def assert_scores_of_transformers(completions: Sequence[Completion], folder: Path, probe: Probe) -> None:
    """Check that every score is that of transformers' states up to the roundings of float32."""
    texts = [PROMPT + completion.token_ids[:-1] for completion in completions]
    exact, allowed = exact_scores(folder, probe, texts)
    assert torch.stack([rows[-1] for rows in exact]).std() > 100 * allowed
    for completion, rows in zip(completions, exact, strict=True):
        assert completion.probe == pytest.approx(float(rows[-1]), abs=allowed)


def copy_checkpoint(folder: Path, parent: Path) -> Path:
    copy = parent / "model"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy
