"""Recipe of the bundled models: its small model is transformers' Qwen3, its optimizer resumes exactly, its labels are
right.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from reasoner.evaluation.suites import countdown
from reasoner.evaluation.suites.registry import POLICY_SUITES, check_answer, get_family
from recipes.bundled import data, generate, measure, model, optim
from recipes.bundled import tokenizer as tok
from recipes.suites.solutions import label_steps
from recipes.suites.steps import boxed
from tests.closeness import assert_rounded
from tests.engine.exact import assert_equal_logits
from tests.rounding import float32_bound
from tests.seeds import keep, shift

transformers = pytest.importorskip("transformers")

SHIPPED = Path(__file__).parents[2] / "reasoner" / "bundled"
KINDS = ("policy", "policy-large", "policy-thinking", "policy-python", "checker", "draft", "prm")
TEXTS = (
    "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45.",
    "",
    "  \t\r\n\n\n\n x\\boxed{12}} 007 12345 \x00",
    "Gr\u00f6\u00dfe \u6771\u4eac \U0001f600 \u0301 \u2028 \ufeff",
)


def small() -> model.Backbone:
    backbone = model.Backbone(model.Shape(width=64, layers=2, heads=4, kv_heads=2, inner=96, vocabulary=300))
    model.initialise(backbone, {i: i for i in range(200)}, seed=0)
    return backbone


@torch.no_grad()
def logits(backbone: model.Backbone, ids: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = backbone(ids) @ backbone.embedding.T
    return made


def exactly(backbone: model.Backbone) -> model.Backbone:
    """Return a float64 copy."""
    return copy.deepcopy(backbone).double()


def test_exported_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    backbone = small()
    with torch.no_grad():
        for name, p in backbone.named_parameters():
            p.copy_(p.half() if p.ndim == 2 else torch.rand_like(p).half())
            assert name
    model.export(backbone, tmp_path)
    ids = torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(shift(1)))
    for text, ours in zip(ids.tolist(), logits(backbone, ids), strict=True):
        assert_equal_logits(ours, tmp_path, text)


def test_batched_generation_equals_generation_without_a_cache() -> None:
    backbone = small().eval()
    prompts = [[5, 9, 12], [7, 3, 3, 8], [1, 2, 3]]
    found = generate.generate(
        backbone, prompts, temperature=0.0, stop=(17,), limit=12, random=torch.Generator().manual_seed(shift(0))
    )
    text = torch.arange(60)[None]
    lost = float32_bound(lambda: logits(exactly(backbone), text))
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = list(prompt)
        for token in tokens:
            law = logits(exactly(backbone), torch.tensor([ids]))[0, -1]
            assert law[token] >= law.max() - 2 * lost
            ids.append(token)


def test_a_grown_model_starts_as_the_same_function() -> None:
    large = model.Backbone(model.Shape(width=64, layers=4, heads=4, kv_heads=2, inner=160, vocabulary=300))
    model.initialise(large, {}, seed=1)
    model.grow(small(), large)
    ids = torch.arange(60).view(2, 30)
    with torch.no_grad():
        bound = float32_bound(lambda: exactly(large)(ids))  # the larger one rounds more
        assert_rounded(large(ids), exactly(small())(ids), bound)


def test_the_optimizer_continues_exactly_from_its_saved_state() -> None:
    def run(steps: int, resume_at: int | None) -> torch.Tensor:
        backbone = small()
        optimizer = optim.Optimizer(backbone.named_parameters(), muon_rate=0.01, adam_rate=0.01)
        for step in range(steps):
            if step == resume_at:
                state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
                optimizer = optim.Optimizer(backbone.named_parameters(), muon_rate=0.01, adam_rate=0.01)
                optimizer.restore(state)
            ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(shift(step)))
            (backbone(ids) @ backbone.embedding.T).logsumexp(-1).sum().backward()
            optimizer.step(1.0)
        return torch.cat([p.detach().flatten() for p in backbone.parameters()])

    torch.testing.assert_close(run(4, None), run(4, 2), rtol=0, atol=0)


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(3, 24, 16, generator=torch.Generator().manual_seed(shift(0)))
    values = torch.linalg.svdvals(optim.orthogonal(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_policy_examples_have_a_target_for_every_token_of_a_right_solution() -> None:
    tokenizer = tok.load()
    for index in range(40):
        example = data.policy_example(tokenizer, 0, index)
        tokens = [token for _, token in example.targets]
        assert tokens[-1] == tok.END
        text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
        problem = data.draw(
            random.Random(keep(f"policy/0/{index}", "the recipe's own")), f"policy/0/{index}", data.POLICY_MIX
        )
        assert all(label_steps(problem, text.split("\n\n")))
        assert example.ids[: example.targets[0][0] + 1] == tok.encode_prompt(tokenizer, problem.text)


def test_prm_examples_label_the_separator_of_every_step() -> None:
    tokenizer = tok.load()
    separator = tokenizer.encode("\n\n", add_special_tokens=False).ids
    assert len(separator) == 1
    for index in range(60):
        example = data.prm_example(tokenizer, 0, index)
        assert [at for at, _ in example.labels] == [i for i, token in enumerate(example.ids) if token == separator[0]]
        assert example.labels[-1][0] == len(example.ids) - 1


def test_a_batch_keeps_positions_and_masks() -> None:
    tokenizer = tok.load()
    examples = [data.prm_example(tokenizer, 0, index) for index in range(30)]
    batch = data.collate(examples)
    flat = batch.ids.flatten()
    assert len(batch.labels) == sum(len(example.labels) for example in examples)
    assert set(flat[batch.label_at].tolist()) == {tok.token_id(tokenizer, "\n\n")}
    masks = [mask for example in examples for _, mask in example.masks]
    for mask, row in zip(masks, batch.masks, strict=True):
        assert [i for i, bit in enumerate(row.tolist()) if bit] == [i for i in range(200) if mask >> i & 1]


def test_branches_with_a_shared_prefix_have_the_outputs_of_separate_sequences() -> None:
    tokenizer = tok.load()
    backbone = model.Backbone(model.Shape(64, 2, 4, 2, 96, vocabulary=tokenizer.get_vocab_size()))
    model.initialise(backbone, {}, seed=0)
    for index in range(6):
        example = data.prm_example(tokenizer, 3, index)
        batch = data.collate([example])
        with torch.no_grad():
            together = backbone(batch.ids, batch.positions, batch.segments)[0]
            for branch in range(1, max(example.segments) + 1):
                own = [i for i, segment in enumerate(example.segments) if segment in (0, branch)]
                ids = torch.tensor([[example.ids[i] for i in own]])
                bound = float32_bound(lambda ids=ids: exactly(backbone)(ids)[0])
                assert_rounded(together[own], exactly(backbone)(ids)[0], bound)


def test_exact_target_probabilities_sum_to_one_and_include_the_chosen_token() -> None:
    tokenizer = tok.load()
    for index in range(60):
        example = data.policy_example(tokenizer, 1, index)
        totals: dict[int, float] = {}
        tokens: dict[int, set[int]] = {}
        for target, token, share in example.choices:
            totals[target] = totals.get(target, 0.0) + share
            tokens.setdefault(target, set()).add(token)
        for target, total in totals.items():
            assert total == pytest.approx(1.0)
            assert example.targets[target][1] in tokens[target]


def test_measures_agree_with_their_definitions() -> None:
    rights = [True] * 3 + [False] * 7
    draws = list(itertools.combinations(rights, 4))
    assert measure.passes(rights, 4) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert measure.auc([(0.9, True), (0.5, True), (0.5, False), (0.1, False)]) == (3.5, 4)
    group = [measure.Attempt([], answer=a, right=a == "7", scores=[s]) for a, s in (("7", 0.9), ("8", 0.3), ("8", 0.4))]
    assert not measure.vote(group, lambda _: 1.0)
    assert measure.vote(group, lambda a: a.last)


@pytest.mark.parametrize("kind", KINDS)
def test_shipped_models_load_in_transformers_with_the_same_logits(kind: str) -> None:
    folder = SHIPPED / kind
    config = json.loads((folder / "config.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert config["vocab_size"] == len(tokenizer) <= 2000
    assert config["head_dim"] % 16 == 0
    if kind not in ("policy-thinking", "policy-python", "checker"):  # which have other tokens
        assert (folder / "tokenizer.json").read_bytes() == (SHIPPED / "policy" / "tokenizer.json").read_bytes()
    assert tokenizer.eos_token_id == config["eos_token_id"] == tok.END
    if kind == "prm":
        assert config["id2label"] == {"0": "bad", "1": "good"}
        assert config["reasoner_prm"] == {"format": "token_classification", "separator": "\n\n", "positive_label": 1}
    else:
        assert config["tie_word_embeddings"]
    backbone, head = model.load(folder)
    ids = tok.encode_prompt(tok.load(), TEXTS[0])
    with torch.no_grad():
        hidden = backbone(torch.tensor([ids]))[0]
        ours = torch.nn.functional.linear(hidden, *head) if head else hidden @ backbone.embedding.T
    assert_equal_logits(ours, folder, ids)


def test_shipped_models_are_small() -> None:
    files = [path for kind in KINDS for path in (SHIPPED / kind).iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 28_000_000


def test_shipped_tokenizer_round_trips_any_text_and_splits_no_number() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED / "policy")
    for text in (*TEXTS, "".join(map(chr, range(1, 0x800)))):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    for number in tok.NUMBERS:
        assert len(tokenizer.encode(f"{number}", add_special_tokens=False)) == 1
    assert len(tokenizer.encode("\n\n", add_special_tokens=False)) == 1


def test_shipped_chat_template_gives_the_recipes_prompt() -> None:
    for name, kind in itertools.product(POLICY_SUITES, ("policy", "policy-thinking", "checker")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED / kind)
        raw = tok.load()
        text = get_family(name).generate_problem("train", 0, get_family(name).LEVELS[0]).text
        message = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        assert tokenizer.encode(rendered, add_special_tokens=False) == tok.encode_prompt(raw, text)


def test_arithmetic_slips_are_labelled_bad() -> None:
    bad = 0
    for seed in range(200):
        problem = countdown.generate_problem("train", seed, "n4")
        steps = data.countdown_attempt(problem, random.Random(shift(seed)), [])
        labels = label_steps(problem, steps)
        bad += not labels[-1]
        assert labels[-1] == (labels[-1] and check_answer(problem, boxed(steps[-1])))
        assert sorted(labels, reverse=True) == labels
    assert bad > 50
