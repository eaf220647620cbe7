"""Write the model cards: what ``reasoner eval`` measured, and what only concerns the models that no search runs on.

reasoner eval countdown --limit 300 --out benchmarks/results/countdown      first, and the same for words
python -m recipes.bundled.report        --kind policy-thinking writes a single card, after make bench-thinking
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from reasoner.evaluation.suites import arithmetic
from reasoner.evaluation.suites.registry import POLICY_SUITES, get_family, load_problems
from reasoner.jobs.tool_specs import PYTHON_INSTRUCTION
from recipes.bundled import SHIPPED, WORK, model
from recipes.bundled import tokenizer as tok
from recipes.bundled.data import policy_example
from recipes.bundled.generate import generate
from recipes.bundled.measure_checker import measure
from recipes.bundled.measure_python import measure_shipped
from recipes.bundled.sample import steps_of
from recipes.suites.steps import boxed

PRM_RUNS = ("prm-attempts", "prm-samples")
KINDS = ("policy", "policy-large", "policy-thinking", "policy-python", "checker", "draft", "prm")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def plain(kind: str, count: int, *, each: int = 4, seed: int = 7) -> dict[str, dict[str, float]]:
    """Return greedy and single-sample accuracy of a policy on each suite."""
    policy, _ = model.load(SHIPPED / kind)
    tokenizer = tok.load()
    found: dict[str, dict[str, float]] = {}
    for name in POLICY_SUITES:
        suite = get_family(name)
        problems = load_problems(name, limit=count, seed=seed)
        found[name] = {}
        for label, temperature, repeat in (("greedy", 0.0, 1), ("one sample at T = 1", 1.0, each)):
            prompts = [tok.encode_prompt(tokenizer, problem.text) for problem in problems for _ in range(repeat)]
            generator = torch.Generator().manual_seed(seed)
            outputs = generate(policy, prompts, temperature=temperature, stop=(tok.END,), random=generator)
            right = 0
            for i, tokens in enumerate(outputs):
                steps = steps_of(tokenizer, tokens)
                right += bool(steps) and suite.check(problems[i // repeat], boxed(steps[-1]))
            found[name][label] = right / len(outputs)
    return found


@torch.inference_mode()
def agreement(count: int = 200) -> dict[str, float]:
    """Return the draft model's token agreement with the policy on solutions of training-like problems."""
    policy, _ = model.load(SHIPPED / "policy")
    draft, _ = model.load(SHIPPED / "draft")
    tokenizer = tok.load()
    same = overlap = total = 0.0
    for index in range(count):
        example = policy_example(tokenizer, 99, index)
        ids = torch.tensor([example.ids])
        at = [position for position, _ in example.targets]
        p = (policy(ids)[0, at] @ policy.embedding.T).softmax(-1)
        q = (draft(ids)[0, at] @ draft.embedding.T).softmax(-1)
        same += float((p.argmax(-1) == q.argmax(-1)).sum())
        overlap += float(torch.minimum(p, q).sum())
        total += len(at)
    return {"same greedy token": same / total, "accepted at T = 1": overlap / total}


def cost(*runs: str) -> str:
    """Return a text with the cost of the training runs."""
    parts: list[str] = []
    for run in runs:
        path = WORK / run / "cost.json"
        if path.exists():
            spent = json.loads(path.read_text())
            parts.append(
                f"`{run}`: {spent['steps']:.0f} steps, {spent['tokens'] / 1e6:.1f}M tokens, "
                f"{spent['seconds'] / 60:.0f} minutes"
            )
    return "; ".join(parts) + ", on one thread of a shared two-core CPU (AVX-512)."


def compared(found: dict[str, dict[str, float]]) -> list[str]:
    """Return a table of the right answers with Python and without it."""
    lines = ["| sampling | level | with Python | without |", "|---|---|---:|---:|"]
    for sampling, shares in found.items():
        for level in (*arithmetic.LEVELS, "all"):
            with_python, without = shares[f"with Python, {level}"], shares[f"without, {level}"]
            lines.append(f"| {sampling} | {level} | {with_python:.3f} | {without:.3f} |")
    return lines


def results(suite: str) -> str:
    """Return the results of ``reasoner eval`` on a suite as Markdown."""
    return (RESULTS / suite / "table.md").read_text()


def judged(found: dict[str, float]) -> list[str]:
    """Return a table of the checker's verdicts."""
    lines = ["| on | cases | with a critique | without |", "|---|---:|---:|---:|"]
    for name in ("answers", "beginnings", "pairs"):
        shares = f"{found[name]:.3f} | {found[f'{name}, direct']:.3f}"
        lines.append(f"| {name} | {found[f'{name}, cases']:.0f} | {shares} |")
    return lines


ABOUT = {
    "policy": "The policy that searches run on: it writes solutions step by step.",
    "policy-large": "A sibling of eleven times the size for comparisons, grown from the finished policy and trained "
    "further on the same kind of data; the cost below comes on top of the policy's.",
    "policy-thinking": "A policy that thinks: before it answers, it searches for a solution between `<think>` and "
    "`</think>`, goes astray, and comes back. Grown from the policy.",
    "policy-python": "A policy that calls Python: it solves word problems with large numbers by code where the system "
    "message offers to run it, and calculates by itself where it does not.",
    "checker": "A verifier that writes: it does the arithmetic of a Countdown solution again, and judges the solution, "
    "a beginning of one, or which of two is better. Grown from the policy that thinks.",
    "draft": "The draft model for speculative decoding of the policy: the same data and tokenizer.",
    "prm": "The process reward model: what a partial solution is worth after each step, from 0 (cannot become right) "
    "to 1. On Countdown a step in between is worth the cube root of the chance that random moves lead on from it.",
}

DATA = """Trained from scratch on problems that `recipes/bundled` generates while training, of two families in plain
English: Countdown (3 to 5 numbers) and multi-step word problems (4 to 10 steps). One canonical problem in ten, chosen
by hash, is held out (`reasoner.evaluation`) and never occurs in training. No other data; no personal data; Apache-2.0
like the code.

The models know nothing but these two families. They exist so that search can be run, tested and measured on any
machine, and they make mistakes by design: a perfect policy would leave nothing to search for."""


THINKING_DATA = """Continued from the policy on Countdown alone, which is then all that it knows: traces of depth-first
searches with exact targets of an expert, and thoughts of its own with the expert's corrections, generated while
training (`recipes/bundled`). One canonical problem in ten, chosen by hash, is held out (`reasoner.evaluation`) and
never occurs in training. No other data; no personal data; Apache-2.0 like the code.

Thoughts have up to 1,400 tokens in training, the context 2,048. `enable_thinking=False` in the chat template gives an
answer without a thought."""


PYTHON_DATA = f"""Trained from scratch on the suite `arithmetic`, which is then all that it knows: word problems with
quantities of four to nine digits and two to four operations, three quarters of them with a solution that calls Python,
the others with every operation written out. The code ends at the closing fence; the service runs it, and injects what
it printed, which was no target of training. One canonical problem in ten, chosen by hash, is held out
(`reasoner.evaluation`) and never occurs in training; its wordings do, with other numbers. No other data; no personal
data; Apache-2.0 like the code.

The system message that offers Python, word for word:

    {PYTHON_INSTRUCTION}

Numbers are groups of three digits, counted from the right, each one token."""


CHECKER_DATA = """Trained on critiques of Countdown solutions, half of them samples of the policy, half synthetic,
generated while training (`recipes/bundled`). The labels are those of the exact rule. One canonical problem in ten,
chosen by hash, is held out (`reasoner.evaluation`) and never occurs in training. No other data; no personal data;
Apache-2.0 like the code.

A critique of a solution with an answer evaluates the expression; one of a beginning does the steps again and goes on to
an end, so that votes are rollouts; one of a pair evaluates both. Its prompts are in the note `reasoner_verifier` of
config.json."""


OWN_DATA = {"policy-thinking": THINKING_DATA, "policy-python": PYTHON_DATA, "checker": CHECKER_DATA}
"""Data of the models that were trained on others than the rest."""


def card(kind: str, report: dict[str, Any]) -> str:
    """Return the model card of one model."""
    config = json.loads((SHIPPED / kind / "config.json").read_text())
    count = report["parameters"][kind]
    lines = [
        f"---\nlicense: apache-2.0\nlanguage: en\nlibrary_name: transformers\n---\n\n# Reasoner {kind}\n",
        ABOUT[kind],
        "",
    ]
    lines.append(
        f"{config['architectures'][0]}, {count / 1e6:.2f}M parameters (fp16), width {config['hidden_size']}, "
        f"{config['num_hidden_layers']} layers, {config['num_attention_heads']} heads of {config['head_dim']} "
        f"({config['num_key_value_heads']} for keys and values), vocabulary {config['vocab_size']}.\n"
    )
    lines += ["## Data", "", OWN_DATA.get(kind, DATA), ""]
    if kind == "prm":
        lines.append(
            "Attempts carry an exact label for every step: first synthetic ones with mistakes, then samples of\n"
            'the policy. Input: the prompt, then each step followed by `"\\n\\n"` (the boxed line too); the score of\n'
            'a step is the softmax probability of label 1 at its `"\\n\\n"`.\n'
        )
    lines += ["## Cost", "", cost(*(PRM_RUNS if kind == "prm" else (kind,))), ""]
    lines += ["## Held-out results", "", "Held-out problems; `python -m recipes.bundled.report` writes this card.", ""]
    if kind == "checker":
        lines += ["Share of right verdicts, on the policy's samples at T = 1:", "", *judged(report["checker"]), ""]
        lines += ["`make bench-verifiers`:", "", results("verifiers")]
    elif kind == "policy-python":
        lines += ["Share of right answers (`python -m recipes.bundled.measure_python`):", ""]
        lines += compared(report["python"])
    elif kind == "policy-thinking":
        lines += ["`make bench-thinking`:", "", results("thinking")]
    elif kind in ("policy", "prm"):
        for name in POLICY_SUITES:
            lines += [f"Suite {name}, 300 problems (`reasoner eval {name} --limit 300`):", "", results(name)]
    else:
        lines += ["| suite | greedy | one sample at T = 1 |", "|---|---|---|"]
        for name, values in report["plain"][kind].items():
            lines.append(f"| {name} | {values['greedy']:.3f} | {values['one sample at T = 1']:.3f} |")
    if kind == "draft":
        rates = ", ".join(f"{name} {value:.3f}" for name, value in report["agreement"].items())
        lines += ["", f"Against the policy, per token on fresh solutions: {rates}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=300, help="for the models that no search runs on")
    parser.add_argument("--kind", choices=KINDS, help="the only card to write; default: all")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kinds = KINDS if options.kind is None else (options.kind,)
    report: dict[str, Any] = {"plain": {}, "parameters": {}, "agreement": agreement() if "draft" in kinds else {}}
    for kind in kinds:
        backbone, found = model.load(SHIPPED / kind)
        count = sum(p.numel() for p in backbone.parameters())
        report["parameters"][kind] = count + sum(tensor.numel() for tensor in found or ())
        if kind == "checker":
            report["checker"] = measure(options.problems)
        if kind == "policy-python":
            report["python"] = measure_shipped(options.problems)
        if kind in ("policy-large", "draft"):
            report["plain"][kind] = plain(kind, options.problems)
    for kind in kinds:
        path: Path = SHIPPED / kind / "README.md"
        path.write_text(card(kind, report))
        print(path)


if __name__ == "__main__":
    main()
