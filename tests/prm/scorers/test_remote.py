"""A verifier behind an OpenAI-compatible server: the same scores as by transformers, for any response shape.

The server is a stand-in that answers like vLLM, with numbers computed by transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from engine.protocol.types import EngineError, EngineUnavailable, InvalidRequest, ScoreItem, ScoreRequest
from engine.remote.http import HttpEngine
from prm.formats.base import Prompt
from prm.scorers.outcome import OutcomeScorer
from prm.scorers.steps import StepChain, StepScorer
from tests.prm.checkpoints import label_logits, next_logprobs, reference, save_checkpoint, score_gap

QUESTION = "How many apples are 3 and 4?"
CHAT = [{"role": "user", "content": QUESTION}]
STEPS = ("add 3 and 4 to get 7.", "it says <extra_0> here", "so the answer is \\boxed{7}")

Shape = Callable[[torch.Tensor, Sequence[int], int], torch.Tensor]
"""Response row from the labels' logits ``[tokens, labels]``, the tokens and the separator's id."""

SHAPES: dict[str, Shape] = {
    "every token, logits": lambda logits, tokens, tag: logits,
    "every token, probabilities": lambda logits, tokens, tag: logits.softmax(-1),
    "tags, probabilities": lambda logits, tokens, tag: logits.softmax(-1)[torch.tensor(tokens) == tag],
}


class Server:
    """Stand-in for vLLM serving ``folder`` as ``m``."""

    def __init__(self, kind: str, folder: Path, *, shape: Shape | None = None) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.verdicts: tuple[int, ...] = ()
        self.reported: Callable[[int], dict[str, Any]] = lambda tokens: {"usage": {"prompt_tokens": tokens}}
        self._kind = kind
        self._folder = folder
        self._shape = shape or SHAPES["every token, logits"]
        self.client = HttpEngine("http://verifier", tokenizer=folder, dialect="vllm")
        self.client._connection._http = httpx.AsyncClient(
            base_url="http://verifier", transport=httpx.MockTransport(self._answer)
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 512}]})
        body = json.loads(request.content)
        self.asked.append((request.url.path, body))
        if request.url.path == "/pooling":
            tag = body["input"][-1]
            rows = self._shape(label_logits(self._kind, self._folder, body["input"]), body["input"], tag)
            answer = {"data": [{"index": 0, "data": rows.tolist()}]} | self.reported(len(body["input"]))
            return httpx.Response(200, json=answer)
        # The likeliest tokens of a trained verifier are its verdicts; the third stands for the others that a server
        # lists.
        tokens = (*self.verdicts, 5)
        logprobs = next_logprobs(self._folder, body["prompt"], tokens)
        listed = {f"token_id:{token}": value for token, value in zip(tokens, logprobs, strict=True)}
        choice = {"logprobs": {"top_logprobs": [listed]}}
        return httpx.Response(200, json={"choices": [choice]} | self.reported(len(body["prompt"])))


async def opened(server: Server) -> tuple[StepScorer, Prompt]:
    [info] = await server.client.models()
    scorer = StepScorer(server.client, info)
    return scorer, await scorer.encode_question(CHAT)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_reward_model_behind_pooling_gives_the_scores_of_transformers(tmp_path: Path, shape: str) -> None:
    server = Server("qwen_math", save_checkpoint("qwen_math", tmp_path / "prm"), shape=SHAPES[shape])
    scorer, prompt = await opened(server)
    whole, second = await scorer.score(prompt, [StepChain((STEPS[0], STEPS[2])), StepChain(STEPS, scored=2)])
    bound = score_gap("qwen_math", tmp_path / "prm")
    expected = reference("qwen_math", tmp_path / "prm", QUESTION, (STEPS[0], STEPS[2]))
    assert whole.scores == pytest.approx(expected, abs=bound)
    # The reference takes the separator within the second step's text for a separator: the last score is the same
    # step's.
    expected = reference("qwen_math", tmp_path / "prm", QUESTION, STEPS)
    assert len(expected) == 4
    assert second.scores == pytest.approx(expected[-1:], abs=bound)
    assert {(path, body["use_activation"]) for path, body in server.asked} == {("/pooling", False)}
    assert {reading.computed for reading in (whole, second)} == {len(body["input"]) for _, body in server.asked}


async def test_a_cache_salt_is_sent_to_pooling(tmp_path: Path) -> None:
    server = Server("qwen_math", save_checkpoint("qwen_math", tmp_path / "prm"))
    for salt in ("ann", None):
        await server.client.score(ScoreRequest("r", "m", (ScoreItem(((5, 6),), (0,)),), cache_salt=salt))
    assert [(path, body.get("cache_salt")) for path, body in server.asked] == [("/pooling", "ann"), ("/pooling", None)]


async def test_a_value_head_behind_pooling_gives_the_scores_of_transformers(tmp_path: Path) -> None:
    server = Server("skywork", save_checkpoint("skywork", tmp_path / "prm"))
    scorer, prompt = await opened(server)
    [reading] = await scorer.score(prompt, [StepChain(STEPS)])
    expected = reference("skywork", tmp_path / "prm", QUESTION, STEPS)
    assert reading.scores == pytest.approx(expected, abs=score_gap("skywork", tmp_path / "prm"))


@pytest.mark.parametrize("kind", ["math_shepherd", "rlhflow_llama", "rlhflow_mistral"])
async def test_a_causal_model_behind_completions_gives_the_scores_of_transformers(tmp_path: Path, kind: str) -> None:
    server = Server(kind, save_checkpoint(kind, tmp_path / "prm"))
    scorer, prompt = await opened(server)
    server.verdicts = scorer._format.token_ids
    steps = (STEPS[0], STEPS[2])
    [reading] = await scorer.score(prompt, [StepChain(steps)])
    expected = reference(kind, tmp_path / "prm", QUESTION, steps)
    assert reading.scores == pytest.approx(expected, abs=score_gap(kind, tmp_path / "prm"))
    assert reading.computed == sum(len(body["prompt"]) for _, body in server.asked)
    assert {(body["max_tokens"], body["return_tokens_as_token_ids"]) for _, body in server.asked} == {(1, True)}


async def test_an_unlisted_verdict_counts_as_the_least_likely_listed_one(tmp_path: Path) -> None:
    server = Server("rlhflow_llama", save_checkpoint("rlhflow_llama", tmp_path / "prm"))
    scorer, prompt = await opened(server)
    plus = scorer._format.token_ids[0]
    listed = {f"token_id:{plus}": math.log(0.9), "token_id:5": math.log(0.1)}
    answer = {"choices": [{"logprobs": {"top_logprobs": [listed]}}], "usage": {"prompt_tokens": 7}}
    server.client._connection._http = httpx.AsyncClient(
        base_url="http://verifier", transport=httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    )
    [reading] = await scorer.score(prompt, [StepChain(STEPS[:1])])
    assert reading.scores == pytest.approx((0.9,))
    del listed[f"token_id:{plus}"]
    [reading] = await scorer.score(prompt, [StepChain(STEPS[:1])])
    assert reading.scores == ()
    assert reading.unread is not None
    assert "is among the likeliest tokens" in reading.unread


async def test_an_outcome_model_behind_pooling_may_answer_a_single_row(tmp_path: Path) -> None:
    folder = save_checkpoint("outcome_two", tmp_path / "orm")
    scores = []
    for shape in (SHAPES["every token, logits"], lambda logits, tokens, tag: logits.softmax(-1)[-1]):
        server = Server("outcome_two", folder, shape=shape)
        [info] = await server.client.models()
        [reading] = await OutcomeScorer(server.client, info, CHAT).score(["so it is 7"])
        scores.append(reading.scores)
    assert scores[0] == pytest.approx(scores[1], abs=score_gap("outcome_two", folder))


async def test_a_bound_is_checked_before_the_request_and_cached_tokens_are_reported(tmp_path: Path) -> None:
    server = Server("qwen_math", save_checkpoint("qwen_math", tmp_path / "prm"))
    scorer, prompt = await opened(server)
    [refused] = await scorer.score(prompt, [StepChain(STEPS[:1])], max_compute=5)
    assert (refused.scores, server.asked) == (None, [])
    server.reported = lambda tokens: {
        "usage": {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 16}}
    }
    [reading] = await scorer.score(prompt, [StepChain(STEPS[:1])], max_compute=refused.computed)
    assert (reading.computed, reading.cached) == (refused.computed - 16, 16)


@pytest.mark.parametrize(
    ("answer", "expected", "message"),
    [
        (httpx.Response(200, json={"data": []}), EngineError, "/pooling is not understood"),
        (
            httpx.Response(200, json={"data": [{"data": [[0.0, 1.0]] * 3}], "usage": {"prompt_tokens": 9}}),
            EngineError,
            "answered 3 rows for .* tokens, 1 of them",
        ),
        (httpx.Response(400, json={"error": {"message": "too long", "code": 400}}), InvalidRequest, "too long"),
        (httpx.Response(503, json={"error": "dead"}), EngineUnavailable, "dead"),
        (httpx.Response(200, content=b"<html>"), EngineUnavailable, "not JSON"),
    ],
)
async def test_a_server_without_the_capability_is_named_with_its_error(
    tmp_path: Path, answer: httpx.Response, expected: type[EngineError], message: str
) -> None:
    server = Server("qwen_math", save_checkpoint("qwen_math", tmp_path / "prm"))
    scorer, prompt = await opened(server)
    server.client._connection._http = httpx.AsyncClient(
        base_url="http://verifier", transport=httpx.MockTransport(lambda _: answer)
    )
    with pytest.raises(expected, match=message):
        await scorer.score(prompt, [StepChain(STEPS[:1])])


async def test_a_server_that_reports_no_tokens_or_too_many_is_refused(tmp_path: Path) -> None:
    server = Server("qwen_math", save_checkpoint("qwen_math", tmp_path / "prm"))
    scorer, prompt = await opened(server)
    server.reported = lambda tokens: {}
    with pytest.raises(EngineError, match="does not report prompt_tokens"):
        await scorer.score(prompt, [StepChain(STEPS[:1])])
    server.reported = lambda tokens: {"usage": {"prompt_tokens": 10_000}}
    with pytest.raises(EngineError, match="cannot be held to a budget"):
        await scorer.score(prompt, [StepChain(STEPS[:1])], max_compute=500)
