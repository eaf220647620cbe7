"""Requests of the workloads, recorded by a stand-in for an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.engine import checkpoint as checkpoints
from benchmarks.engine.checkpoint import SIZES, Size, checkpoint
from benchmarks.engine.workloads import WORKLOADS, Generate, Outputs, Request, run, warm_up

TINY = Size(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48)


class Notebook:
    """Engine that answers with consecutive numbers and records every call."""

    def __init__(self, short: int = 0) -> None:
        self.calls: list[list[Request]] = []
        self.sessions = 0
        self._short = short
        self._next = 0

    @contextmanager
    def session(self, *, seed: int, greedy: bool = False) -> Iterator[Generate]:
        self.sessions += 1
        yield self._generate

    def _generate(self, requests: Sequence[Request]) -> Outputs:
        self.calls.append(list(requests))
        return [[self._tokens(one.tokens - self._short) for _ in range(one.samples)] for one in requests]

    def _tokens(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


@pytest.mark.parametrize(
    ("case", "tokens", "first"),
    [
        ("W1", 16 * 128, [(512, 16, 128)]),
        ("W2", sum(range(16, 257, 16)), [(64, 1, length) for length in range(16, 257, 16)]),
        ("W3", 8 * 8 * 32, [(512, 8, 32)]),
        ("W4", 128, [(32, 1, 128)]),
        ("prompt", 2000, [(2000, 1, 1)]),
    ],
)
def test_a_workload_requests_the_tokens_of_its_definition(
    case: str, tokens: int, first: list[tuple[int, int, int]]
) -> None:
    system = Notebook()
    assert run(case, system, 3)["tokens"] == tokens
    assert [(len(one.prompt), one.samples, one.tokens) for one in system.calls[0]] == first
    assert len({one.prompt for one in system.calls[0]}) == len(first)
    assert system.sessions == 1


def test_each_round_of_the_tree_search_sends_the_paths_of_four_survivors_twice() -> None:
    system = Notebook()
    run("W3", system, 3)
    assert len(system.calls) == 8
    prompt = system.calls[0][0].prompt
    for index, call in enumerate(system.calls[1:], start=1):
        assert [(len(one.prompt), one.samples, one.tokens) for one in call] == [(512 + 32 * index, 2, 32)] * 4
        assert len({one.prompt for one in call}) == 4
        earlier = {one.prompt for one in system.calls[index - 1]}
        assert all(one.prompt[:-32] in earlier and one.prompt[:512] == prompt for one in call)


@pytest.mark.parametrize("case", WORKLOADS)
def test_a_seed_fixes_the_prompts_and_no_two_seeds_share_one(case: str) -> None:
    systems = [Notebook() for _ in range(3)]
    for system, seed in zip(systems, (5, 5, 6), strict=True):
        run(case, system, seed)
    first, same, other = ([call[0].prompt[:32] for call in system.calls] for system in systems)
    assert first == same
    assert not set(first) & set(other)


@pytest.mark.parametrize("case", WORKLOADS)
def test_an_engine_that_stops_early_is_detected(case: str) -> None:
    with pytest.raises(RuntimeError, match="asked for samples of"):
        run(case, Notebook(short=1), 3)


@pytest.mark.parametrize("case", WORKLOADS)
def test_a_warm_up_has_the_shapes_of_the_case_and_few_tokens(case: str) -> None:
    warm, timed = Notebook(), Notebook()
    warm_up(case, warm)
    run(case, timed, 3)
    for short, long in zip(warm.calls[:1], timed.calls[:1], strict=True):
        assert [(len(one.prompt), one.samples) for one in short] == [(len(one.prompt), one.samples) for one in long]
        assert all(one.tokens <= 8 for one in short)


def test_checkpoints_are_the_same_wherever_they_are_created(tmp_path: Path) -> None:
    first, second = (checkpoint("tiny", TINY, tmp_path / name) for name in ("a", "b"))
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_transformers_loads_a_checkpoint_and_its_32000_tokens(tmp_path: Path) -> None:
    folder = checkpoint("tiny", TINY, tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert len(tokenizer) == model.config.vocab_size == 32_000
    assert tokenizer.eos_token_id == 31_999
    assert tokenizer.decode(tokenizer("naïve café 你好").input_ids) == "naïve café 你好"
    assert all(tokenizer.decode([index]).isascii() for index in range(300, 31_999, 101))


def test_a_checkpoint_is_created_once_and_never_partially(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(size: Size, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "_make", broken)
        with pytest.raises(OSError, match="disk full"):
            checkpoint("tiny", TINY, tmp_path)
    assert not list(tmp_path.iterdir())
    folder = checkpoint("tiny", TINY, tmp_path)
    monkeypatch.setattr(checkpoints, "_make", broken)
    assert checkpoint("tiny", TINY, tmp_path) == folder


def test_the_sizes_are_the_published_ones(tmp_path: Path) -> None:
    sizes = {name: (size.hidden, size.layers, size.heads, size.kv_heads) for name, size in SIZES.items()}
    assert sizes == {"50M": (512, 8, 8, 4), "250M": (1024, 16, 16, 8), "500M": (1280, 22, 20, 10)}
    config = json.loads((checkpoint("tiny", TINY, tmp_path) / "config.json").read_text())
    assert (config["hidden_size"], config["head_dim"], config["intermediate_size"]) == (32, 8, 48)
