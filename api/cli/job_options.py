"""Options of a job on the command line, and the job specification that they make."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from reasoner.client import Client
from reasoner.jobs.spec import DEFAULT_STRATEGY
from reasoner.strategies.registry import STRATEGIES

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of commands that take the parameters of the strategy as options."""

Question = Annotated[str, typer.Argument(help='The question; "-" reads it from standard input.')]
Strategy = Annotated[str | None, typer.Option(help=f"One of {', '.join(STRATEGIES)}.")]


_LIMITS = ("tokens", "thinking_tokens", "seconds", "flops", "cost", "effort")
"""The fields of the budget."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The fields of a job, each of which has its default in the service."""

    strategy: Strategy = None
    tokens: Annotated[int | None, typer.Option(min=1, help="Budget: generated and verifier tokens.")] = None
    thinking_tokens: Annotated[
        int | None, typer.Option(min=0, help="Budget: tokens of one solution's thought, after which it must answer.")
    ] = None
    seconds: Annotated[float | None, typer.Option(min=0.001, help="Budget: seconds of work.")] = None
    flops: Annotated[float | None, typer.Option(min=1, help="Budget: FLOPs, two per weight and computed token.")] = None
    cost: Annotated[float | None, typer.Option(min=0, help="Budget: money, by the prices of the service.")] = None
    effort: Annotated[
        str | None, typer.Option(help="Budget by name: minimal, low, medium, high, or one that the service defines.")
    ] = None
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed gives the same search.")] = None
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Same seed, same tree, whatever the timing of the branches.")
    ] = False
    record_logprobs: Annotated[
        bool, typer.Option("--record-logprobs", help="Keep tokens and log-probabilities, for 'reasoner export'.")
    ] = False
    model: Annotated[
        str | None, typer.Option(help="A served model; without a running service, a bundled model or a model folder.")
    ] = None
    mixed: Annotated[
        list[str] | None,
        typer.Option("--with", help="A further model to sample from, for strategies that can. Repeatable."),
    ] = None
    system: Annotated[str | None, typer.Option(help="System message before the question; default: the model's.")] = None
    prompt: Annotated[
        str | None, typer.Option(help="Template of the question, such as 'Solve: {problem}'; default: the model's.")
    ] = None
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a solution. Repeatable.")] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest solution in tokens.")] = None
    temperature: Annotated[float | None, typer.Option(min=0, max=10, help="Sampling temperature.")] = None
    answer: Annotated[
        str | None, typer.Option(help="How answers are compared: math, text, choice or code; or the field as JSON.")
    ] = None
    python: Annotated[bool, typer.Option("--python", help="Let the model run Python while it reasons.")] = False
    constraint: Annotated[
        str | None,
        typer.Option(help="Language of the solutions, as JSON: '{\"json_schema\": {…}}', regex, grammar or choice."),
    ] = None
    verifier: Annotated[
        str | None,
        typer.Option(help='Verifier: its kind, or the field as JSON: \'{"kind": "numeric", "expected": 4}\'.'),
    ] = None

    def build_spec(self, question: str, extra: list[str], **more: Any) -> dict[str, Any]:
        """Return the specification of a job without ``model``.

        ``extra`` are the parameters of the strategy as options, ``more`` further fields. Raises ``typer.BadParameter``.
        """
        limits = {name: getattr(self, name) for name in _LIMITS}
        verifier = parse_word_or_json("verifier", self.verifier)
        question = _read_question(question)
        sampling = _without_none({"temperature": self.temperature, "max_tokens": self.max_tokens})
        return {"problem": question, "budget": _without_none(limits)} | _without_none(
            {
                "system": self.system,
                "prompt": self.prompt,
                "stop": self.stop or None,
                # without one the service chooses it, by the effort if there is one
                "strategy": build_strategy(self.strategy, extra) or None,
                "sampling": sampling or None,
                "seed": self.seed,
                "answer": parse_word_or_json("answer", self.answer),
                "verifier": {"kind": verifier} if isinstance(verifier, str) else verifier,
                "tools": [{"type": "python"}] if self.python else None,
                "constraint": parse_word_or_json("constraint", self.constraint),
                "deterministic": self.deterministic or None,
                "record_logprobs": self.record_logprobs or None,
                **more,
            }
        )


def build_strategy(name: str | None, extra: list[str]) -> dict[str, Any]:
    """Return a strategy with the parameters ``--n 16 --max-steps=8``, which the service checks.

    Raises ``typer.BadParameter``.
    """
    words = [word for argument in extra for word in (argument.split("=", 1) if argument[:2] == "--" else [argument])]
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        raise typer.BadParameter(f"give parameters of the strategy as --NAME VALUE; not understood: {' '.join(extra)}")
    strategy: dict[str, Any] = {} if name is None else {"name": name}
    for option, value in zip(words[::2], words[1::2], strict=True):
        try:
            strategy[option.removeprefix("--").replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            strategy[option.removeprefix("--").replace("-", "_")] = value
    return strategy


def name_models(spec: dict[str, Any], client: Client, model: str | None, mixed: list[str] | None) -> dict[str, Any]:
    """Return the job with its model, or with several: the given one, else the service's own, and the further ones."""
    if mixed:
        names = [model or str(client.models()["default"]), *mixed]
        return spec | {"models": [{"model": name} for name in names]}
    return spec if model is None else spec | {"model": model}


def list_more_models(verifier: Any, mixed: list[str] | None) -> list[str]:
    """Return the models that a job names besides its own: its verifier's and those that it samples from."""
    scorer = verifier.get("model") if isinstance(verifier, dict) else None
    return [*(mixed or ()), *([scorer] if isinstance(scorer, str) else [])]


def name_strategy(spec: dict[str, Any], client: Client, model: str | None) -> dict[str, Any]:
    """Return the job; if its strategy has parameters and no name, with the name of the default strategy."""
    strategy = spec.get("strategy")
    if strategy is None or "name" in strategy:
        return spec
    if spec.get("verifier") is not None:
        name = DEFAULT_STRATEGY
    else:
        listed = {entry["id"]: entry["defaults"] for entry in client.models()["data"]} if model else {}
        defaults = listed.get(model or "")
        name = client.default_strategy() if defaults is None else str(defaults["strategy"]["name"])
    return spec | {"strategy": {"name": name} | strategy}


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _read_question(question: str) -> str:
    """Return the question itself, from standard input for "-"."""
    if question != "-":
        return question
    try:
        question = sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8: {error}", param_hint="PROBLEM") from None
    if not question:
        raise typer.BadParameter("standard input is empty: write the question to it", param_hint="PROBLEM")
    return question


def parse_word_or_json(option: str, text: str | None) -> Any:
    """Return the JSON object that an option contains, or its text. Raises ``typer.BadParameter``."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not valid JSON: {error}", param_hint=f"--{option}") from None
