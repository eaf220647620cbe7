"""The size of the KV cache on a GPU: what weights and the largest step leave of the allowed share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.cache.states import SLOTS_PER_SEQUENCE
from engine.core import gpu_memory
from engine.core.gpu_memory import GpuMemory, MemoryReading, NotEnoughMemory, divide
from engine.core.local_engine import LocalEngine
from engine.core.model_setup import ModelWeights
from engine.protocol.types import Branch
from engine.runner.largest_step import run_largest_step
from engine.server.app import main
from engine.speculation.drafters.draft_model import POOL_BYTES
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import EMULATED_BYTES, EMULATED_STEP_BYTES, emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate
from tests.long import mostly_long

GIB = 1 << 30
AUTO = replace(SMALL, kv_tokens=None)
DEVICE = torch.device("cpu")


@pytest.mark.parametrize(
    ("allowed", "used", "step", "drafters", "share"),
    [
        (72, 16, 2, [0], 54),
        (72, 16, 2, [4], 50),
        (72, 30, 2, [4, 0], 18),
        (72, 72, 0, [0], 0),
        (20, 16, 6, [0], -2),
    ],
)
def test_models_share_what_weights_and_the_largest_step_leave(
    allowed: int, used: int, step: int, drafters: list[int], share: int
) -> None:
    assert divide(allowed * GIB, used * GIB, step * GIB, [one * GIB for one in drafters]) == share * GIB


class ReadingsInTurn:
    """Free memory of an 80 GiB GPU at each reading."""

    def __init__(self, *free: float) -> None:
        self._free = [int(one * GIB) for one in free]

    def __call__(self, device: torch.device) -> MemoryReading:
        return MemoryReading(self._free.pop(0), 80 * GIB)


def test_two_models_take_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """78 GiB free; weights of 15 and 3 GiB leave 60; the first cache, of 25 GiB, leaves 35."""
    monkeypatch.setattr(gpu_memory, "read_memory", ReadingsInTurn(78, 60, 35))
    memory = GpuMemory(0.9)
    assert memory.open(DEVICE) == 72 * GIB
    memory.add("policy", step=4 * GIB, drafter=0)
    memory.add("prm", step=GIB, drafter=0)
    assert memory.take("policy", DEVICE, 1 << 20, 2048) == 25 * 1024
    assert memory.take("prm", DEVICE, 1 << 20, 2048) == 25 * 1024


def test_other_programs_on_the_gpu_are_named_with_the_share_that_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "read_memory", ReadingsInTurn(40.5))
    with pytest.raises(NotEnoughMemory, match=r"72.00 GiB of this GPU's 80.00 GiB.* leave 40.50 GiB.* at most 0.5$"):
        GpuMemory(0.9).open(DEVICE)


def test_a_gpu_that_is_too_small_is_told_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "read_memory", ReadingsInTurn(80, 10))
    memory = GpuMemory(0.9)
    memory.open(DEVICE)
    memory.add("large", step=GIB, drafter=0)
    expected = r"'large' needs 70.00 GiB for weights, 1.00 GiB for a step and 2.00 GiB for one sequence.* has 72.00 GiB"
    with pytest.raises(NotEnoughMemory, match=expected) as caught:
        memory.take("large", DEVICE, 1 << 20, 2048)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "qwen3_classify"])
def test_the_cache_fills_what_the_largest_step_leaves(
    kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_gpu(monkeypatch)
    core = Harness(checkpoints(kind), replace(AUTO, gpu_memory_utilization=0.75)).core
    left = int(0.75 * EMULATED_BYTES) - EMULATED_STEP_BYTES
    assert left - SMALL.page_size * core.cache.data[:, :, :, 0, 0].nbytes < core.cache.data.nbytes <= left


@pytest.mark.parametrize("kind", mostly_long(["qwen3_5", "lfm2", "falcon_h1", "mamba2"], every=3))
def test_states_take_a_part_of_the_memory_for_keys(
    kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter, and all of it if the model has no keys; with a given number of slots what these need."""
    emulate_gpu(monkeypatch)
    options = replace(AUTO, gpu_memory_utilization=0.75, max_running=4096)
    left = int(0.75 * EMULATED_BYTES) - EMULATED_STEP_BYTES
    for given in (None, 7):
        harness = Harness(checkpoints(kind), replace(options, state_slots=given))
        cache, config = harness.core.cache, harness.core.model.decoder.config
        assert cache.states is not None
        slot = sum(tensor[0].nbytes for layer in cache.states.layers for tensor in layer)
        fitting = min(left // (4 if config.attention else 1) // slot, 6 * options.max_running)
        assert cache.states.num_slots == (given or fitting) > SLOTS_PER_SEQUENCE
        if config.attention:
            rest = left - cache.states.num_slots * slot
            page = sum(pool.data[:, :, :, 0].nbytes for pool in cache.pools)
            assert rest - page < sum(pool.data.nbytes for pool in cache.pools) <= rest
        assert len(harness.complete(generate([3, 4], [Branch(1, 1, 2)]))) == 1


def test_states_that_do_not_fit_are_told_in_numbers(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)
    expected = r"needs 0.00 GiB for weights, \d+.\d\d GiB for states, 0.01 GiB for a step"
    with pytest.raises(NotEnoughMemory, match=expected):
        Harness(checkpoints("qwen3_5"), replace(AUTO, state_slots=50_000))


def test_a_fixed_size_is_not_measured(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)
    monkeypatch.setattr("engine.core.model_setup.measure_peak", None)
    monkeypatch.setattr(gpu_memory, "read_memory", None)
    assert Harness(checkpoints("qwen3")).core.stats.kv_capacity == SMALL.kv_tokens


async def test_a_policy_and_a_verifier_share_a_gpu(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)
    engine = LocalEngine({"policy": checkpoints("qwen3"), "prm": checkpoints("qwen3_classify")}, AUTO)
    caches = [core.cache.data.nbytes for core in engine._cores.values()]
    left = int(0.9 * EMULATED_BYTES) - EMULATED_STEP_BYTES
    # The emulated GPU has as much free after the first cache as before.
    assert caches[0] == pytest.approx(left / 2, rel=0.01)
    assert caches[1] == pytest.approx(left, rel=0.01)
    await engine.close()


def test_a_draft_model_has_its_own_memory(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)
    monkeypatch.setattr(gpu_memory, "read_memory", lambda _: MemoryReading(GIB, GIB))
    options = replace(AUTO, draft=f"draft_model={checkpoints('llama')}")
    plain, drafted = (ModelWeights("m", checkpoints("qwen3"), one) for one in (AUTO, options))
    lost = plain.choose_num_tokens() - drafted.choose_num_tokens()
    assert lost * plain.bytes_per_token == pytest.approx(POOL_BYTES, abs=SMALL.page_size * plain.bytes_per_token)


def test_the_server_ends_with_status_1_and_one_line(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emulate_gpu(monkeypatch)
    monkeypatch.setattr(gpu_memory, "read_memory", lambda _: MemoryReading(1 << 20, 1 << 20))
    assert main(["--model", f"m={checkpoints('qwen3')}"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("engine: model 'm' needs 0.00 GiB for weights")
    assert printed.count("\n") == 1


@pytest.mark.parametrize("failing", ["engine.core.model_setup.load_model", "engine.core.model_setup.run_largest_step"])
def test_weights_or_steps_that_do_not_fit_are_one_line(
    failing: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    emulate_gpu(monkeypatch)
    monkeypatch.setattr(failing, fail)
    with pytest.raises(NotEnoughMemory, match="use a larger GPU"):
        Harness(checkpoints("qwen3"), AUTO)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_window", "qwen3_moe", "qwen3_classify", "qwen3_5", "mamba2"])
def test_the_largest_step_computes_all_tokens_and_samples_all_rows(
    kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_gpu(monkeypatch)
    model = ModelWeights("m", checkpoints(kind), AUTO).model
    seen: list[tuple[int, ...]] = []
    for name in ("forward", "compute_logits"):
        real = getattr(model, name)

        def watched(*arguments: object, real: object = real) -> torch.Tensor:
            out: torch.Tensor = real(*arguments)  # type: ignore[operator]
            seen.append(tuple(out.shape))
            return out

        monkeypatch.setattr(model, name, watched)
    run_largest_step(model, torch.float32, page_size=16, num_tokens=600, num_sampled=7, context=48)
    config = model.config
    assert seen[0] == (600, config.hidden_size)
    assert seen[1] == (600, config.num_labels or config.vocab_size)
    assert seen[2:] == ([] if config.num_labels else [(7, config.vocab_size)])


def test_scores_are_read_in_parts_that_fit(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.core.test_recovery import READ

    harness = Harness(checkpoints("qwen3"))
    expected = [one.values for one in harness.score(READ)]
    monkeypatch.setattr("engine.runner.sample_step._MAX_LOGITS", 1)
    assert [one.values for one in harness.score(READ)] == expected
    assert harness.complete(generate([3, 4], [Branch(1, 1, 2)]))
