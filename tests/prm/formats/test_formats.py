"""Every public PRM format: scores equal transformers' on one forward pass, and cached tokens are not recomputed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError
from prm.formats.base import Prompt
from prm.formats.registry import FORMAT_NOTE
from prm.scorers.steps import StepChain, StepScorer, VerifierScores
from tests.prm.checkpoints import FORMATS, reference, save_checkpoint, score_gap

KINDS = sorted(FORMATS)
QUESTION = "How many apples are 3 and 4?"
STEPS = ("add 3 and 4 to get 7.", "Step 2: so 7 - 3 = 4,\nas it should.", "so the answer is \\boxed{7}")
CHAT = [{"role": "user", "content": QUESTION}]
OPTIONS = EngineOptions(kv_tokens=4096, max_running=32, step_tokens=512)

Folders = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_checkpoint(kind, tmp_path_factory.mktemp("prm") / kind)
        return made[kind]

    return make


@pytest.fixture
async def engine(request: pytest.FixtureRequest, folders: Folders) -> AsyncIterator[LocalEngine]:
    local = LocalEngine({"prm": folders(request.param)}, OPTIONS)
    yield local
    await local.close()


def every_kind(test: Callable[..., object]) -> object:
    return pytest.mark.parametrize(("kind", "engine"), [(kind, kind) for kind in KINDS], indirect=["engine"])(test)


async def opened(engine: LocalEngine) -> tuple[StepScorer, Prompt]:
    [info] = await engine.models()
    scorer = StepScorer(engine, info)
    return scorer, await scorer.encode_question(CHAT)


def steps_of(kind: str) -> tuple[str, ...]:
    """Return ``STEPS`` as the format divides and numbers them."""
    if kind == "skywork":
        return tuple(line for step in STEPS for line in step.split("\n"))
    return tuple(step.removeprefix("Step 2: ") for step in STEPS) if kind == "math_shepherd" else STEPS


def scores(reading: VerifierScores) -> tuple[float, ...]:
    assert reading.scores is not None
    return reading.scores


@every_kind
async def test_scores_equal_a_full_forward_pass_by_transformers(
    kind: str, engine: LocalEngine, folders: Folders
) -> None:
    scorer, prompt = await opened(engine)
    steps = scorer.steps("\n\n".join(STEPS), complete=True)
    [reading] = await scorer.score(prompt, [StepChain(steps)])
    expected = reference(kind, folders(kind), QUESTION, steps_of(kind))
    assert len(set(expected)) == len(steps)
    assert scores(reading) == pytest.approx(expected, abs=score_gap(kind, folders(kind)))


@every_kind
async def test_a_growing_chain_has_the_same_scores_and_every_token_is_computed_once(
    kind: str, engine: LocalEngine, folders: Folders
) -> None:
    scorer, prompt = await opened(engine)
    steps = scorer.steps("\n\n".join(STEPS), complete=True)
    grown, computed = [], []
    for count in range(1, len(steps) + 1):
        [reading] = await scorer.score(prompt, [StepChain(steps[:count], scored=count - 1)])
        grown += scores(reading)
        computed.append(reading.computed)
    await engine.clear_cache()
    [whole] = await scorer.score(prompt, [StepChain(steps)])
    assert grown == pytest.approx(scores(whole), abs=score_gap(kind, folders(kind)))
    assert sum(computed) == whole.computed
    assert whole.cached == 0


@every_kind
async def test_siblings_share_their_common_prefix_within_one_batch(
    kind: str, engine: LocalEngine, folders: Folders
) -> None:
    scorer, prompt = await opened(engine)
    begun = scorer.steps(STEPS[0], complete=True)
    await scorer.score(prompt, [StepChain(begun)])
    ends = ("3 + 4 = 7", "4 + 3 = 8", "3 - 4 = 7")
    chains = [StepChain((*begun, end), scored=len(begun)) for end in ends]
    together = await scorer.score(prompt, chains)
    await engine.clear_cache()
    alone = [(await scorer.score(prompt, [StepChain(chain.steps)]))[0] for chain in chains]
    first = alone[0].computed - together[0].computed
    assert [reading.cached for reading in together] == [first] * 3
    for reading, whole in zip(together, alone, strict=True):
        assert scores(reading) == pytest.approx(scores(whole)[-1:], abs=score_gap(kind, folders(kind)))
        assert reading.computed < whole.computed + whole.cached - first + 1


@every_kind
async def test_an_empty_or_unfinished_step_gets_no_score(kind: str, engine: LocalEngine, folders: Folders) -> None:
    scorer, prompt = await opened(engine)
    [clean] = await scorer.score(prompt, [StepChain(scorer.steps("one is 1\n\ntwo is 2", complete=True))])
    assert len(scores(clean)) == 2
    for text in (
        "one is 1\n\ntwo is 2\n\n",
        "\n\none is 1\n\n\n\n \n\ntwo is 2\n\n\n\n",
        "one is 1\n\ntwo is 2\n\nthr",
    ):
        [reading] = await scorer.score(prompt, [StepChain(scorer.steps(text, complete=False))])
        assert scores(reading) == pytest.approx(scores(clean), abs=score_gap(kind, folders(kind)))


@every_kind
async def test_a_separator_within_a_steps_text_adds_no_score(kind: str, engine: LocalEngine) -> None:
    scorer, prompt = await opened(engine)
    [reading] = await scorer.score(prompt, [StepChain(("it says <extra_0> and ки <extra_0>", "then 7"))])
    assert len(scores(reading)) == 2


@every_kind
async def test_a_bound_on_computation_is_enforced_and_the_exact_number_reported(kind: str, engine: LocalEngine) -> None:
    scorer, prompt = await opened(engine)
    chain = StepChain(("add 3 and 4",))
    [refused] = await scorer.score(prompt, [chain], max_compute=1)
    assert refused.scores is None
    [reading] = await scorer.score(prompt, [chain], max_compute=refused.computed)
    assert reading.computed == refused.computed
    assert len(scores(reading)) == 1


@pytest.mark.parametrize(
    ("kind", "missing", "token"),
    [("qwen_math", "<extra_0>", "<extra_0>"), ("rlhflow_llama", "", "ки")],
)
async def test_a_separator_unknown_to_the_tokenizer_is_refused_by_name(
    tmp_path: Path, kind: str, missing: str, token: str
) -> None:
    folder = save_checkpoint(kind, tmp_path / kind, special=())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for added in tokenizer["added_tokens"]:
        if added["content"] == missing:
            added["content"] = "<other>"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer).replace(f'"{missing}": ', '"<other>": '))
    local = LocalEngine({"my-prm": folder}, OPTIONS)
    [info] = await local.models()
    if kind == "rlhflow_llama":
        info = replace(info, extra={**info.extra, FORMAT_NOTE: "math_shepherd"})
    scorer = StepScorer(local, info)
    with pytest.raises(EngineError, match=rf"separator '{token}' is not a token of the tokenizer of model 'my-prm'"):
        await scorer.encode_question(CHAT)
    await local.close()
