"""Models with states on the engine: forks, preemption and drafts give the tokens of a branch that is computed alone."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineError, ScoreItem
from engine.quantization.options import create_options
from engine.quantization.quantize import quantize
from engine.speculation.control.controller import FixedController
from kernels.cpu.runtime import recorder
from tests.engine.conftest import Checkpoints
from tests.engine.exact import assert_equal_logits, float32_loss
from tests.engine.helpers import SMALL, Harness, generate, score
from tests.engine.models.test_models import engine_logits, random_tokens
from tests.engine.speculation.stub_drafters import Oracle
from tests.long import mostly_long

HYBRIDS = ["qwen3_next", "granite_hybrid", "lfm2", "qwen3_5", "nemotron_h_moe", "jamba", "mamba2", "falcon_h1"]
PROMPT = random_tokens(45, 1)
BRANCHES = [Branch(5, key, 24) for key in range(6)]


def complete_alone(checkpoints: Checkpoints, kind: str, prompt: tuple[int, ...], branch: Branch) -> Completion:
    """Return a branch as an engine computes it that has nothing cached and nothing else to do."""
    [completion] = Harness(checkpoints(kind)).complete(generate(prompt, [branch], temperature=0.8, ignore_eos=True))
    return completion


def assert_same(found: list[Completion], checkpoints: Checkpoints, kind: str, prompt: tuple[int, ...]) -> None:
    for completion, branch in zip(found, BRANCHES, strict=True):
        assert completion.token_ids == complete_alone(checkpoints, kind, prompt, branch).token_ids


@pytest.mark.parametrize("kind", mostly_long(HYBRIDS, every=2))
def test_branches_of_one_prompt_fork_its_state(checkpoints: Checkpoints, kind: str) -> None:
    """All but the first branch find all of the prompt but its last token cached."""
    found = Harness(checkpoints(kind)).complete(generate(PROMPT, BRANCHES, temperature=0.8, ignore_eos=True))
    assert [completion.cached_tokens for completion in found] == [0, *[len(PROMPT) - 1] * (len(BRANCHES) - 1)]
    assert_same(found, checkpoints, kind, PROMPT)


@pytest.mark.parametrize("kind", mostly_long(HYBRIDS, every=2))
def test_a_step_that_does_not_fit_into_the_recordings_memory_advances_states_once(
    checkpoints: Checkpoints, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory grows with the first steps of each size, which must not be computed again."""
    monkeypatch.setattr(recorder, "_MIN_ARENA_FLOATS", 64)
    harness = Harness(checkpoints(kind))
    prompts = [random_tokens(5 + 7 * index, index) for index in range(6)]
    requests = [generate(prompt, [BRANCHES[0]], temperature=0.8, ignore_eos=True) for prompt in prompts]
    events = [harness.submit(replace(request, request_id=str(index))) for index, request in enumerate(requests)]
    harness.run()
    for prompt, found in zip(prompts, events, strict=True):
        [completion] = (event for event in found if isinstance(event, Completion))
        assert completion.token_ids == complete_alone(checkpoints, kind, prompt, BRANCHES[0]).token_ids


@pytest.mark.parametrize("kind", mostly_long(HYBRIDS, every=2))
def test_a_search_goes_on_at_the_end_of_each_step(checkpoints: Checkpoints, kind: str) -> None:
    harness = Harness(checkpoints(kind))
    [parent] = harness.complete(generate(PROMPT, [Branch(1, 0, 13)], temperature=0.8, ignore_eos=True))
    longer = (*PROMPT, *parent.token_ids)
    children = harness.complete(generate(longer, BRANCHES, temperature=0.8, ignore_eos=True))
    assert {completion.cached_tokens for completion in children} == {len(longer) - 1}
    assert_same(children, checkpoints, kind, longer)


@pytest.mark.parametrize("kind", mostly_long(HYBRIDS, every=2))
def test_a_verifier_reads_a_solution_on_the_cached_prefix(checkpoints: Checkpoints, kind: str) -> None:
    folder = checkpoints(kind)
    harness = Harness(folder)
    harness.complete(generate(PROMPT, [Branch(1, 0, 1)], temperature=0.0, ignore_eos=True))
    [result] = harness.score(score(ScoreItem((PROMPT, (7, 8, 9)), (1,)), token_ids=range(20)))
    [alone] = Harness(folder).score(score(ScoreItem((PROMPT, (7, 8, 9)), (1,)), token_ids=range(20)))
    assert (result.cached_tokens, alone.cached_tokens) == (len(PROMPT), 0)
    assert result.values is not None
    assert alone.values is not None
    assert result.values[0] == pytest.approx(alone.values[0], abs=2 * float32_loss(folder).logit)


@pytest.mark.parametrize("kind", mostly_long(HYBRIDS, every=3))
@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(kv_tokens=160, max_running=8, step_tokens=24),
        replace(SMALL, state_slots=2),
        replace(SMALL, state_slots=5),
        replace(SMALL, draft="ngram"),
        replace(SMALL, draft="ngram", state_slots=14),
        replace(SMALL, kv_dtype="int8"),
    ],
    ids=["preempted", "one slot each", "few slots", "drafts", "drafts with few slots", "int8 keys"],
)
def test_little_memory_and_drafts_change_no_token(checkpoints: Checkpoints, kind: str, options: EngineOptions) -> None:
    prompt = (*PROMPT[:20], *PROMPT[:20], *PROMPT[:5])  # a repeated text, of which the n-gram drafter knows the rest
    asked = generate(prompt, BRANCHES, temperature=0.8, ignore_eos=True)
    found = Harness(checkpoints(kind), options).complete(asked)
    plain = Harness(checkpoints(kind), replace(SMALL, kv_dtype=options.kv_dtype)).complete(asked)
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in plain]


@pytest.mark.parametrize("kind", mostly_long(HYBRIDS, every=2))
@pytest.mark.parametrize("shape", [(4, 4), (4, 9)], ids=["chain", "tree"])
@pytest.mark.parametrize("slots", [None, 16])
def test_accepted_drafts_go_on_from_their_own_state(
    checkpoints: Checkpoints, kind: str, shape: tuple[int, int], slots: int | None
) -> None:
    """Drafts that are right with probability 0.8, at a random node of a tree; with few slots some steps have none."""
    branches = [Branch(1, key, 40) for key in range(3)]
    asked = generate(PROMPT, branches, temperature=0.8, ignore_eos=True)
    plain = Harness(checkpoints(kind)).complete(asked)
    known = {
        (1, key, len(PROMPT) + place): token
        for key, one in enumerate(plain)
        for place, token in enumerate(one.token_ids)
    }
    harness = Harness(checkpoints(kind), replace(SMALL, state_slots=slots))
    harness.core.start_speculation(Oracle(known, 360, right=0.8), FixedController(*shape))
    found = harness.complete(asked)
    assert sum(one.accepted_tokens for one in found) > 20
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    child = generate((*PROMPT, *found[0].token_ids[:20], 7), [Branch(2, 0, 10)], temperature=0.8, ignore_eos=True)
    [after], [alone] = harness.complete(child), Harness(checkpoints(kind)).complete(child)
    assert after.token_ids == alone.token_ids


@pytest.mark.parametrize(
    "kind",
    mostly_long(["nemotron_h_moe", "qwen3_next", "qwen3_5", "granite_hybrid", "mamba2", "falcon_h1_norm"], every=3),
)
def test_a_deterministic_model_has_the_same_bits_with_and_without_a_cache(checkpoints: Checkpoints, kind: str) -> None:
    options = replace(SMALL, deterministic=True)
    harness = Harness(checkpoints(kind), options)
    [parent] = harness.complete(generate(PROMPT, [Branch(1, 0, 13)], temperature=0.8, ignore_eos=True))
    asked = generate((*PROMPT, *parent.token_ids), BRANCHES, temperature=0.8, ignore_eos=True)
    cached = harness.complete(asked)
    for completion, branch in zip(cached, BRANCHES, strict=True):
        [alone] = Harness(checkpoints(kind), options).complete(replace(asked, branches=(branch,)))
        assert (completion.cached_tokens, alone.cached_tokens) == (len(asked.prompt) - 1, 0)
        assert (completion.token_ids, completion.logprob) == (alone.token_ids, alone.logprob)


@pytest.mark.parametrize(("kind", "is_read"), [("qwen3_5", True), ("nemotron_h", True), ("llama", False)])
def test_prediction_heads_are_skipped_in_families_that_have_them(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, is_read: bool
) -> None:
    folder = shutil.copytree(checkpoints(kind), tmp_path / "model")
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"mtp.fc.weight": torch.ones(3, 3)}, path, metadata={"format": "pt"})
    with nullcontext() if is_read else pytest.raises(EngineError, match=r"does not use: mtp\.fc\.weight"):
        Harness(folder)


@pytest.mark.parametrize("kind", mostly_long(["granite_hybrid", "nemotron_h_moe", "falcon_h1_norm"], every=3))
@pytest.mark.parametrize("seed", mostly_long(range(20), every=10))
def test_a_prefill_in_steps_of_any_length_equals_transformers(checkpoints: Checkpoints, kind: str, seed: int) -> None:
    """Twenty texts, each cut into steps of another length, and its second half again behind the cached first."""
    options = EngineOptions(kv_tokens=512, max_running=8, step_tokens=7 + 3 * seed)
    tokens, harness = random_tokens(60 + seed, 100 + seed), Harness(checkpoints(kind), options)
    assert_equal_logits(engine_logits(harness, tokens), checkpoints(kind), tokens)
    half = len(tokens) // 2
    assert_equal_logits(engine_logits(harness, tokens, start=half), checkpoints(kind), tokens, start=half)


def test_what_keeps_no_states_refuses_a_hybrid_model(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints("qwen3_5")
    with pytest.raises(EngineError, match="has recurrent layers; choose a draft model whose layers all have attention"):
        Harness(checkpoints("qwen3"), replace(SMALL, draft=f"draft_model={folder}"))
    with pytest.raises(EngineError, match="models with recurrent layers are not supported for quantisation"):
        quantize(folder, tmp_path / "out", create_options("rtn", 8, None, None), lambda *_: None)


def test_too_few_slots_for_one_sequence_are_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(
        EngineError, match="state_slots is 1; this model has layers with states, and a sequence needs 2"
    ):
        Harness(checkpoints("lfm2"), replace(SMALL, state_slots=1))
