"""Training data, drawn while training: the seed and the index of an example decide it, so a resumed run sees the same.

Policy examples are problems of the training split with one random valid solution. PRM examples are attempts, good and
bad, with an exact label for every step.

    python -m recipes.bundled.data        draws some, audits them and writes a preview to work/preview.jsonl
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from reasoner.evaluation.suites.countdown import canonical as canonical_countdown
from reasoner.evaluation.suites.countdown import good_moves, reachable
from reasoner.evaluation.suites.problem import Problem, split_of
from reasoner.evaluation.suites.registry import get_family
from reasoner.evaluation.suites.words import canonical as canonical_words
from recipes.bundled import WORK
from recipes.bundled import tokenizer as tok
from recipes.suites import countdown, words
from recipes.suites.solutions import label_steps, sample_solution

Mix = tuple[tuple[str, str, float], ...]

POLICY_MIX: Mix = (
    ("countdown", "n3", 0.05),
    ("countdown", "n4", 0.10),
    ("countdown", "n5", 0.10),
    ("words", "s6", 0.06),
    ("words", "s8", 0.08),
    ("words", "s10", 0.12),
    ("words", "h4", 0.14),
    ("words", "h6", 0.20),
    ("words", "h8", 0.15),
)
"""Share of each level among the policy's examples: little Countdown, so that search has something to find."""

PRM_MIX: Mix = (
    ("countdown", "n3", 0.08),
    ("countdown", "n4", 0.32),
    ("countdown", "n5", 0.35),
    ("words", "s10", 0.05),
    ("words", "h4", 0.05),
    ("words", "h6", 0.08),
    ("words", "h8", 0.07),
)
"""The same for the PRM, whose harder subject is Countdown."""

BRANCHES = 8
"""Attempts at one problem that the PRM reads together."""

SLIPS = (1, 1, 1, 1, 2, 2, 2, 3, 4, 9, 10, 10, 10, 11, 20, 100)
"""Errors of wrong results; a value's probability is proportional to its number of occurrences."""


@dataclass(slots=True)
class Example:
    """Token ids and the targets by position; absent heads are empty."""

    ids: list[int]
    targets: list[tuple[int, int]] = field(default_factory=list)
    """(position, next token)."""
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    """0 for the trunk, 1 and up for the branches that continue it; empty for one plain sequence."""
    choices: list[tuple[int, int, float]] = field(default_factory=list)
    """(index of a target, token, probability): where many tokens are right, their exact shares."""
    labels: list[tuple[int, float]] = field(default_factory=list)
    """(position, worth of the step, from 0 for a bad one to 1)."""
    masks: list[tuple[int, int]] = field(default_factory=list)
    """(position, bit mask of the values that can be reached there)."""


def draw(rng: random.Random, seed: int | str, mix: Mix) -> Problem:
    """Sample a training problem of a level from a mix."""
    name, level, _ = rng.choices(mix, [share for _, _, share in mix])[0]
    problem: Problem = get_family(name).generate_problem("train", seed, level)
    return problem


def policy_example(tokenizer: Tokenizer, seed: int, index: int) -> Example:
    """Return a problem and a random valid solution; every token of the solution is a target.

    Where a step is chosen (its first number, its operation, its second number), the target is the exact distribution
    over all valid choices and not the one that was drawn: the same optimum with far less noise.
    """
    rng = random.Random(f"policy/{seed}/{index}")
    problem = draw(rng, f"policy/{seed}/{index}", POLICY_MIX)
    steps = sample_solution(problem, rng)
    prompt = tok.encode_prompt(tokenizer, problem.text)
    body = [*tokenizer.encode(tok.SEPARATOR.join(steps), add_special_tokens=False).ids, tok.END]
    ids = prompt + body
    example = Example(ids[:-1], [(i, ids[i + 1]) for i in range(len(prompt) - 1, len(ids) - 1)])
    start, separator = 0, tok.token_id(tokenizer, tok.SEPARATOR)
    for step, options in zip(steps, valid_choices(problem, steps), strict=False):
        pieces = step.split(" ")
        for place in range(3):
            options = [o for o in options if [str(part) for part in o[:place]] == pieces[:place]]
            shares = Counter(str(o[place]) for o in options)
            for piece, count in shares.items():
                token = tok.token_id(tokenizer, f" {piece} " if place == 1 else piece)
                example.choices.append((start + place, token, count / len(options)))
        start = body.index(separator, start) + 1
    return example


def valid_choices(problem: Problem, steps: list[str]) -> Iterator[list[tuple[int, str, int]]]:
    """Yield every valid (a, op, b) before each step of a right solution except the boxed one."""
    numbers: list[int] | None = problem.data.get("numbers")
    ledger = words.PartialSolution.of(problem) if numbers is None else None
    for step in steps[:-1]:
        a, op, b, _, result, *_ = step.replace(",", "").split(" ")
        if ledger is not None:
            yield ledger.options()
            ledger.take(int(a), op, int(b), int(result))
        elif numbers is not None:
            yield [move[:3] for move in good_moves(numbers, problem.data["target"])]
            numbers = countdown.apply(numbers, step)


def prm_example(tokenizer: Tokenizer, seed: int, index: int) -> Example:
    """Return synthetic attempts at one problem, which share their first good steps, with exact labels."""
    rng = random.Random(f"prm/{seed}/{index}")
    problem = draw(rng, f"prm/{seed}/{index}", PRM_MIX)
    solution = sample_solution(problem, rng)
    shared = solution[: min(rng.choice((0, 0, 0, 1, 1, 2, 3, 4)), len(solution) - 2)]
    attempt = countdown_attempt if problem.suite == "countdown" else words_attempt
    attempts = [attempt(problem, rng, shared) for _ in range(BRANCHES)]
    return packed(tokenizer, problem, shared, attempts, rng, stop=0.4)


def packed(
    tokenizer: Tokenizer,
    problem: Problem,
    shared: list[str],
    attempts: list[list[str]],
    rng: random.Random,
    *,
    stop: float = 0.0,
) -> Example:
    """Attempts at one problem as one example: a trunk (the prompt and the shared steps) and a branch for each attempt.

    Branches see the trunk and themselves and all continue the trunk's positions, so each is exactly what the PRM reads
    at inference, and the trunk is computed once. A branch ends at random soon after its first bad step, and after a
    good one with probability ``stop``.
    """
    example = Example(tok.encode_prompt(tokenizer, problem.text))
    countdowns = problem.suite == "countdown"
    state: list[int] | None = problem.data["numbers"] if countdowns else None

    def note(numbers: list[int] | None) -> None:
        if numbers is not None and len(numbers) > 1:
            example.masks.append((len(example.ids) - 1, reachable(tuple(sorted(numbers)))))

    def write(step: str, label: float) -> None:
        pieces = step.split(" ")
        if len(pieces) >= 5 and pieces[3] == "=" and pieces[0].isdigit() and pieces[2].isdigit() and pieces[1] != "/":
            truth = words.arithmetic(int(pieces[0]), pieces[1], int(pieces[2]))
            if 0 <= truth < len(tok.NUMBERS):
                example.targets.append((len(example.ids) + 3, tok.token_id(tokenizer, str(truth))))
        example.ids.extend(tokenizer.encode(step + tok.SEPARATOR, add_special_tokens=False).ids)
        example.labels.append((len(example.ids) - 1, label))

    note(state)
    for step in shared:
        state = countdown.apply(state, step) if state is not None else None
        write(step, worth(problem, state, True))
        note(state)
    trunk = len(example.ids)
    example.positions = list(range(trunk))
    example.segments = [0] * trunk
    branches: dict[tuple[tuple[str, bool], ...], None] = {}
    for steps in attempts:
        labelled = list(zip(steps, label_steps(problem, steps), strict=True))
        end = len(shared) + 1
        while end < len(steps) and rng.random() >= (stop if labelled[end - 1][1] else 0.6):
            end += 1
        branches[tuple(labelled[len(shared) : end])] = None
    for branch, entries in enumerate(branches, 1):
        begin, numbers = len(example.ids), state
        for step, good in entries:
            numbers = countdown.apply(numbers, step) if numbers is not None else None
            write(step, worth(problem, numbers, good))
            note(numbers)
        length = len(example.ids) - begin
        example.positions.extend(range(trunk, trunk + length))
        example.segments.extend([branch] * length)
    return example


def worth(problem: Problem, numbers: list[int] | None, good: bool) -> float:
    """Return the soft label of a step: 0 for a bad one, 1 for a good one after which there is no choice left.

    In between, on Countdown, it is the cube root of the chance that random legal moves from here reach the target.
    Math-Shepherd (Wang et al. 2023, section 3.2) estimates such a share with rollouts; here it is exact. A beam needs
    it: of two steps that keep the target in reach, the one with more ways to go on is worth more. The root spreads the
    small chances of early steps apart.
    """
    if not good or numbers is None or len(numbers) == 1:
        return float(good)
    return float(countdown.odds(numbers, problem.data["target"]) ** (1 / 3))


def countdown_attempt(problem: Problem, rng: random.Random, shared: list[str]) -> list[str]:
    """Return moves that deviate from good ones, sometimes with a false final claim or an arithmetic error."""
    steps = countdown.walk(problem, rng, stray=rng.choice((0.2, 0.6)), given=shared)
    target = problem.data["target"]
    if not steps[-2].endswith(f" {target}") and rng.random() < 0.4:
        steps[-2] = f"{steps[-2].split(' = ')[0]} = {target}, left {target}"
    if rng.random() < 0.12:
        place = rng.randrange(len(shared), len(steps))
        pieces = steps[place].split(" ")
        slots = [i for i, piece in enumerate(pieces) if piece.strip(",()\\boxed{}").isdigit()]
        slot = rng.choice(slots)
        number = pieces[slot].strip(",()\\boxed{}")
        other = rng.choice([number + "", *[p.strip(",()\\boxed{}") for i, p in enumerate(pieces) if i in slots]])
        wrong = str(max(1, int(number) + rng.choice((-10, -2, -1, 1, 2, 10)))) if rng.random() < 0.7 else other
        pieces[slot] = pieces[slot].replace(number, wrong)
        steps[place] = " ".join(pieces)
    return steps


def words_attempt(problem: Problem, rng: random.Random, shared: list[str]) -> list[str]:
    """Return running totals; half of the attempts have an error at a random step, with which they continue."""
    ledger = words.PartialSolution.of(problem)
    count = int(problem.level[1:])
    slip = min(len(shared) + rng.choice((0, 0, 0, 1, 1, 2, 3, 8)), count) if rng.random() < 0.65 else -1
    steps: list[str] = []
    for step in shared:
        left, sign, right, _, written = step.split(" ")
        ledger.take(int(left), sign, int(right), int(written))
        steps.append(step)
    while options := ledger.options():
        a, op, b = rng.choice(options)
        result = words.arithmetic(a, op, b)
        if len(steps) == slip:
            kind = rng.random()
            if kind < 0.75 or ledger.total is None:
                result = max(1, result + rng.choice((-1, 1)) * rng.choice(SLIPS))
            elif kind < 0.83 and op in "+-":
                flipped = ledger.total - b if op == "+" else ledger.total + b
                if 0 < flipped < 500:
                    steps.append(f"{ledger.total} {'-' if op == '+' else '+'} {b} = {flipped}")
                    ledger.take(a, op, b, flipped)
                    continue
            elif kind < 0.93 and ledger.used:
                again = rng.choice(ledger.used)
                if 0 < ledger.total + again < 500:
                    steps.append(f"{ledger.total} {'+' if again > 0 else '-'} {abs(again)} = {ledger.total + again}")
                    ledger.total += again
                    continue
            else:
                break
        result = min(result, 499)
        ledger.take(a, op, b, result)
        steps.append(f"{a} {op} {b} = {result}")
    return [*steps, f"\\boxed{{{ledger.total}}}"]


# Batches


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples of similar length, padded on the right; positions index the flattened (batch * length) hidden states."""

    ids: Tensor
    positions: Tensor | None
    segments: Tensor | None
    target_at: Tensor
    targets: Tensor
    share_of: Tensor
    """Index of the target to which each share belongs."""
    share_token: Tensor
    shares: Tensor
    """Probabilities, which sum to one for each target."""
    label_at: Tensor
    labels: Tensor
    mask_at: Tensor
    masks: Tensor
    """(rows, 200) of 0 and 1."""


def collate(examples: list[Example], multiple: int = 8) -> Batch:
    longest = max(len(example.ids) for example in examples)
    length = -(-longest // multiple) * multiple
    ids = np.full((len(examples), length), tok.PAD, dtype=np.int64)
    branched = bool(examples[0].segments)
    positions, segments = np.zeros_like(ids), np.zeros_like(ids)
    targets: list[tuple[int, int]] = []
    labels: list[tuple[int, float]] = []
    masks: list[tuple[int, int]] = []
    shares: list[tuple[int, int, float]] = []
    for row, example in enumerate(examples):
        chosen = {index for index, _, _ in example.choices}
        shares.extend((len(targets) + index, token, share) for index, token, share in example.choices)
        certain = ((index, token) for index, (_, token) in enumerate(example.targets) if index not in chosen)
        shares.extend((len(targets) + index, token, 1.0) for index, token in certain)
        ids[row, : len(example.ids)] = example.ids
        if branched:
            positions[row, : len(example.ids)] = example.positions
            segments[row, : len(example.ids)] = example.segments
        targets.extend((row * length + at, token) for at, token in example.targets)
        labels.extend((row * length + at, label) for at, label in example.labels)
        masks.extend((row * length + at, mask) for at, mask in example.masks)
    bits = np.zeros((len(masks), 200), dtype=np.float32)
    for row, (_, mask) in enumerate(masks):
        packed = np.frombuffer((mask & ((1 << 200) - 1)).to_bytes(25, "little"), dtype=np.uint8)
        bits[row] = np.unpackbits(packed, bitorder="little")
    target_at, target = np.array(targets, dtype=np.int64).reshape(-1, 2).T
    label_at, label = np.array(labels, dtype=np.float64).reshape(-1, 2).T
    mask_at = np.array([at for at, _ in masks], dtype=np.int64)
    share_of, share_token, share = np.array(shares, dtype=np.float64).reshape(-1, 3).T
    tensor = torch.from_numpy
    return Batch(
        ids=tensor(ids),
        positions=tensor(positions) if branched else None,
        segments=tensor(segments) if branched else None,
        target_at=tensor(target_at.copy()),
        targets=tensor(target.copy()),
        share_of=tensor(share_of.astype(np.int64)),
        share_token=tensor(share_token.astype(np.int64)),
        shares=tensor(share.astype(np.float32)),
        label_at=tensor(label_at.astype(np.int64)),
        labels=tensor(label.astype(np.float32)),
        mask_at=tensor(mask_at),
        masks=tensor(bits),
    )


def bucketed(examples: list[Example], tokens: int, rng: random.Random) -> Iterator[Batch]:
    """Yield batches of about ``tokens`` padded tokens and similar length, in random order."""
    examples = sorted(examples, key=lambda example: len(example.ids))
    groups: list[list[Example]] = [[]]
    for example in examples:
        if groups[-1] and (len(groups[-1]) + 1) * len(example.ids) > tokens:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    for group in groups:
        yield collate(group)


def main() -> None:
    """Audit: labels agree with the generators, held-out problems never occur, lengths fit."""
    tokenizer = tok.load()
    seen: Counter[str] = Counter()
    good: Counter[str] = Counter()
    longest = 0
    WORK.mkdir(exist_ok=True)
    with (WORK / "preview.jsonl").open("w") as file:
        for index in range(3000):
            rng = random.Random(f"audit/{index}")
            problem = draw(rng, f"audit/{index}", POLICY_MIX)
            if problem.suite == "countdown":
                key = canonical_countdown(problem.data["numbers"], problem.data["target"])
            else:
                key = canonical_words([tuple(term) for term in problem.data["terms"]])
            if split_of(key) != "train":
                raise AssertionError(f"held-out problem among the training data: {problem.id}")
            steps = sample_solution(problem, rng)
            if not all(label_steps(problem, steps)):
                raise AssertionError(f"a solution is labelled bad: {problem.id}")
            attempt = (countdown_attempt if problem.suite == "countdown" else words_attempt)(problem, rng, [])
            labels = label_steps(problem, attempt)
            longest = max(longest, len(policy_example(tokenizer, 0, index).ids))
            seen[problem.level] += 1
            good[problem.level] += labels[-1]
            file.write(
                json.dumps({"text": problem.text, "solution": steps, "attempt": attempt, "labels": labels}) + "\n"
            )
    for level in sorted(seen):
        print(f"{level}: {seen[level]} problems, {good[level] / seen[level]:.0%} of the PRM's attempts end well")
    print(f"longest policy example: {longest} tokens; no held-out problem; preview in {WORK / 'preview.jsonl'}")


if __name__ == "__main__":
    main()
