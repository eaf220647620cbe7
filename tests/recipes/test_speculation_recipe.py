"""Recipe of draft heads: the trained module is the drafter, runs resume exactly, and texts are the target's samples."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.core.local_engine import LocalEngine
from engine.models.decoder import Decoder
from engine.protocol.types import Branch, Completion, GenerateRequest, SamplingParams
from engine.speculation.drafters import tree_draft
from engine.speculation.load import load_drafter
from recipes.bundled.train import Plan
from recipes.speculation import measure, report, texts
from recipes.speculation import train as training
from recipes.speculation.eagle3 import choose_layers
from recipes.speculation.kinds import HEADS
from recipes.speculation.objective import collate, levels
from recipes.speculation.small import KIND, Small
from recipes.speculation.target import Target
from recipes.speculation.texts import Author, Prompts, Text
from tests.closeness import log_sum_bound
from tests.engine.exact import float32_loss, gap
from tests.engine.speculation.heads import Asked, Recorder
from tests.seeds import shift

POLICY = Path(__file__).parents[2] / "reasoner" / "bundled" / "policy"
DRAFT = POLICY.parent / "draft"
KINDS = sorted(HEADS)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(shift(0))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(POLICY, "cpu")


@pytest.fixture(scope="module")
def author(target: Target) -> Iterator[Author]:
    author = Author(target, 40)
    yield author
    author.close()


@pytest.fixture(scope="module")
def written(author: Author) -> list[Text]:
    return author.write(Prompts(None, 1.0).held_out(24), seed=3)


def drafted(some: list[Text], folder: Path, patch: pytest.MonkeyPatch) -> list[Asked]:
    """Return greedy chains of four draft tokens by the drafter in a folder."""
    recorders: list[Recorder] = []

    def load_recorded(wanted: str, folder: Path, model: Decoder, *, context: int) -> Recorder:
        drafter = load_drafter(wanted, folder, model, context=context)
        assert drafter is not None
        recorders.append(Recorder(drafter))
        return recorders[-1]

    patch.setattr(measure, "load_drafter", load_recorded)
    for text in some:  # each alone, since the last entry of a shared prefix may be another text's
        measure.tokens_per_step(POLICY, folder, [text], (4, 4), greedy=True, limit=12)
    asked = [one for recorder in recorders for one in recorder.asked if one.wish.depth == 4][::3]
    assert len(asked) >= 8
    assert sum(len(one.draft) for one in asked) > 3 * len(asked)
    return asked


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_drafts_the_trained_modules_argmax(
    target: Target, written: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Greedy chains of the engine from an exported head equal the module's likeliest tokens over the same text."""
    monkeypatch.setattr(target, "embedding_scale", 4.0)
    monkeypatch.setattr(tree_draft, "FLOOR", 0.0)
    head = HEADS[kind](target, 4)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_((p + 0.1 * torch.randn_like(p)).half())  # exactly representable in the exported dtype
    head.save(tmp_path, target)
    for one in drafted(written[::4], tmp_path, monkeypatch):
        known = len(one.tokens)
        ids = collate([Text(one.tokens, list(one.draft.tokens), 0.0)], "cpu").ids
        with torch.no_grad():
            states = head(head.inputs(target, target.features(ids)), target.embed(ids))
            said = [
                int(head.read(target, state[0, known - 2]).argmax())
                for _, state in zip(one.draft.tokens, states, strict=False)
            ]
        assert list(one.draft.tokens) == said


@pytest.mark.parametrize("kind", KINDS)
def test_a_levels_target_is_the_target_models_distribution_at_the_drafted_position(
    target: Target, written: list[Text], kind: str
) -> None:
    """Distributions and positions are computed by definition, one text at a time without padding."""
    head = HEADS[kind](target, 3)
    some = written[:3]
    batch = collate(some, "cpu")
    with torch.no_grad():
        found = list(levels(head, target, batch))
        for number, level in enumerate(found):
            expected, roots = [], []
            for text in some:
                ids = torch.tensor([text.prompt + text.tokens])
                distributions = target.model(ids).logits[0].log_softmax(-1)
                # The first generated token is known when the first draft token is proposed.
                predicted = range(len(text.prompt) + 1 + number, ids.shape[1])
                expected += [distributions[place - 1] for place in predicted]
                roots.append([place - 2 - number for place in predicted])
            torch.testing.assert_close(level.target, torch.stack(expected), atol=gap(POLICY), rtol=0)
            assert [row.nonzero().flatten().tolist() for row in level.roots] == roots
            share = level.target.exp() * (level.target - level.head)
            bound = log_sum_bound(share.shape[1]) * float(share.abs().sum(1).mean())
            assert float(level.loss) == pytest.approx(float(share.sum(1).mean()), abs=bound)
    assert len(found) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_resumes_exactly(
    target: Target, written: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(training, "BATCH_TOKENS", 400)

    def run(folder: Path, stops: tuple[int, ...]) -> dict[str, torch.Tensor]:
        for stop in stops:
            torch.manual_seed(shift(1))
            head = HEADS[kind](target, 2)
            # The learning rate depends on the plan's last step, so the run is stopped by the plan's time limit, not by
            # fewer steps.
            monkeypatch.setattr(Plan, "progress", lambda _, step, seconds, stop=stop: float(step >= stop))
            assert training.train(head, target, written, Plan(steps=8, warmup=2), folder)["steps"] == stop
        return {name: p.detach().clone() for name, p in head.named_parameters()}

    whole, resumed = run(tmp_path / "whole", (8,)), run(tmp_path / "resumed", (3, 8))
    start = dict(HEADS[kind](target, 2).named_parameters())
    for name, p in whole.items():
        assert torch.equal(resumed[name], p)
        assert not torch.equal(start[name], p)


def test_a_draft_model_starts_as_its_base_model(target: Target, written: list[Text]) -> None:
    """A base with another vocabulary is refused."""
    small = Target(DRAFT, "cpu")
    ids = collate(written[:3], "cpu").ids
    with torch.no_grad():
        grown = Small(target, DRAFT, 3)(ids)
        bound = 2 * float32_loss(DRAFT).logit
        torch.testing.assert_close(grown, small.model(ids).logits, atol=bound, rtol=0)
    other = SimpleNamespace(config=SimpleNamespace(vocab_size=100))
    with pytest.raises(SystemExit, match="vocabulary is 826, but the target's is 100"):
        Small(other, DRAFT, 2)  # type: ignore[arg-type]


def test_a_draft_models_targets_are_the_target_models_distributions_and_the_engine_drafts_its_argmax(
    target: Target, written: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(target, DRAFT, 2)
    with torch.no_grad():
        for p in small.parameters():
            p.copy_((p + 0.05 * torch.randn_like(p)).half())
        [level] = levels(small, target, collate(written[:2], "cpu"))
        expected = []
        for text in written[:2]:
            distributions = target.model(torch.tensor([text.prompt + text.tokens])).logits[0].log_softmax(-1)
            # The first draft token is the second generated one.
            expected.append(distributions[len(text.prompt) : -1])
        torch.testing.assert_close(level.target, torch.cat(expected), atol=gap(POLICY), rtol=0)
        assert level.roots.sum() == len(level.target) == len(level.head)
        small.save(tmp_path, target)
        assert measure.kind_of(tmp_path) == KIND
        for one in drafted(written[::4], tmp_path, monkeypatch):
            ids = torch.tensor([one.tokens + list(one.draft.tokens)])
            said = small(ids)[0, len(one.tokens) - 1 : -1].argmax(-1)
            assert list(one.draft.tokens) == said.tolist()


def test_eagle3_heads_fuse_the_layers_of_published_ones_where_the_target_has_them() -> None:
    assert [choose_layers(count) for count in (4, 6, 7, 36)] == [(1, 2, 3), (1, 3, 5), (2, 3, 4), (2, 18, 33)]
    with pytest.raises(SystemExit, match="the target has 3 layers; eagle3 needs at least 4"):
        choose_layers(3)


def test_training_lowers_the_loss_of_a_head(target: Target, written: list[Text], tmp_path: Path) -> None:
    """Fifteen steps on the same few texts lower the loss of an untrained head."""
    head = HEADS["eagle"](target, 2)
    before = report.held_out(head, target, written)
    training.train(head, target, written, Plan(steps=15, warmup=3, adam_rate=0.003), tmp_path)
    after = report.held_out(head, target, written)
    for one, other in zip(before, after, strict=True):
        assert other.loss < 0.7 * one.loss
        assert other.overlap > one.overlap
        assert 0 <= other.reached <= other.overlap <= 1


def test_texts_are_the_targets_samples_and_complete_shards_are_kept(
    author: Author, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text equals a client's for its prompt, seed and number; complete shards are only read."""
    monkeypatch.setattr(texts, "SHARD", 9)
    prompts = Prompts(None, 1.0)
    made = author.training(prompts, 500, tmp_path)
    assert 500 <= sum(len(text.tokens) for text in made) < 500 + 9 * 40
    assert {text.temperature for text in made} == {0.0, 0.7, 1.0}
    one = made[10]
    assert one.prompt == author.encode(prompts.training(10).text)
    branch = Branch(seed=texts.SEED + 1, key=1, max_tokens=40)
    request = GenerateRequest("r", "m", tuple(one.prompt), (branch,), SamplingParams(temperature=one.temperature))

    async def ask() -> Completion:
        engine = LocalEngine({"m": POLICY})
        async for event in engine.generate(request):
            await engine.close()
            assert isinstance(event, Completion)
            return event
        raise AssertionError

    assert list(asyncio.run(ask()).token_ids) == one.tokens
    monkeypatch.setattr(Author, "write", lambda *_: pytest.fail("a complete shard was written again"))
    assert author.training(prompts, 500, tmp_path) == made


def test_held_out_prompts_are_not_trained_on(tmp_path: Path) -> None:
    suites = Prompts(None, 1.0)
    known = {suites.training(number).text for number in range(300)}
    assert not known & {prompt.text for prompt in suites.held_out(100)}
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(f"prompt {number}" for number in range(45)))
    lines = Prompts(file, 0.8)
    assert [prompt.text for prompt in lines.held_out(10)] == ["prompt 0", "prompt 20", "prompt 40"]
    assert {lines.training(number).text for number in range(100)} == {
        f"prompt {number}" for number in range(45) if number % 20
    }


def test_batches_hold_every_text_once_in_each_epoch(written: list[Text], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "BATCH_TOKENS", 300)
    stream = training.batches(written, "cpu", 0)
    ends: list[list[int]] = []
    for _ in range(2):
        rows: list[list[int]] = []
        while len(rows) < len(written):
            batch = next(stream)
            assert batch.ids.numel() <= 300
            rows += [ids[:end].tolist() for ids, end in zip(batch.ids, batch.end.flatten(), strict=True)]
        assert sorted(rows) == sorted(text.prompt + text.tokens for text in written)
        ends += rows
    assert ends[: len(written)] != ends[len(written) :]
