"""Inspect's batch mode: an evaluation by OpenAI's two endpoints and by Anthropic's, and a refused sample."""

from __future__ import annotations

import json
import sys
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import BatchConfig, ChatMessageUser, ContentImage, ContentText
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, user_message

BASE, MODEL = sys.argv[1:]
IMAGE = "data:image/png;base64,iVBORw0KGgo="


def evaluate(model: str, samples: list[Any], base: str, **settings: Any) -> EvalLog:
    dataset = [Sample(input=sample, target="Paris") for sample in samples]
    task = Task(
        dataset=dataset, solver=[generate(), user_message("And what did I ask?"), generate()], scorer=includes()
    )
    [log] = eval(
        task,
        model=model,
        model_base_url=base,
        model_args={"api_key": "none"} | settings,
        batch=BatchConfig(size=len(samples), send_delay=5.0, tick=0.2),
        fail_on_error=False,
        max_retries=0,
        display="none",
        log_dir="logs",
    )
    return log


def read_accuracy(log: EvalLog) -> float | str:
    if log.status != "success" or log.results is None:
        return f"{log.status}: {log.error}"
    return log.results.scores[0].metrics["accuracy"].value


def main() -> dict[str, Any]:
    questions = [f"What is the capital of France? ({number})" for number in range(4)]
    messages = BASE.removesuffix("/v1")
    found: dict[str, Any] = {
        "chat": read_accuracy(evaluate(f"openai/{MODEL}", questions, BASE, responses_api=False)),
        "responses": read_accuracy(evaluate(f"openai/{MODEL}", questions, BASE, responses_api=True)),
        "messages": read_accuracy(evaluate(f"anthropic/{MODEL}", questions, messages)),
    }
    refused = [ChatMessageUser(content=[ContentText(text="What is the capital of France?"), ContentImage(image=IMAGE)])]
    samples = evaluate(f"anthropic/{MODEL}", [questions[0], refused], messages).samples or []
    errors = [sample.error and sample.error.message for sample in samples]
    found["errors"] = [error and "images are not supported" in error for error in errors]
    return found


print(json.dumps(main()))
