"""The client against OpenAI-compatible servers: a real ``transformers serve``, and scripted vLLM and SGLang."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    EngineClient,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    KeyBound,
    ScoreItem,
    TokenizeRequest,
)
from engine.remote.branches.stream import branch_seed, routing_headers
from engine.remote.health import Health
from engine.remote.http import HttpEngine
from engine.remote.throttle import Throttle
from tests.engine.helpers import generate, score

POLICY = Path(__file__).parents[3] / "reasoner" / "bundled" / "policy"
MESSAGES = [{"role": "user", "content": "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45."}]


@pytest.fixture(scope="module")
def transformers_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start ``transformers serve`` on the bundled policy."""
    home = tmp_path_factory.mktemp("home")
    (home / "hub").mkdir()
    serve = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", serve, "serve", str(POLICY), "--device", "cpu", "--port", "0"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stderr is not None
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if running := re.search(r"running on (http://\S+)", line):
                    yield running[1]
                    break
            else:
                pytest.fail("transformers serve did not start:\n" + "".join(said))
        finally:
            process.kill()


@pytest.fixture
async def foreign(transformers_url: str) -> AsyncIterator[HttpEngine]:
    client = HttpEngine(transformers_url, tokenizer=POLICY)
    yield client
    await client.close()


@pytest.fixture
async def ours() -> AsyncIterator[LocalEngine]:
    local = LocalEngine({"policy": POLICY}, EngineOptions(kv_tokens=4096))
    yield local
    await local.close()


async def collect(engine: EngineClient, request: GenerateRequest) -> list[Completion]:
    events = [event async for event in engine.generate(request)]
    return sorted((event for event in events if isinstance(event, Completion)), key=lambda one: one.index)


async def test_transformers_serve_gives_the_results_of_our_engine(foreign: HttpEngine, ours: LocalEngine) -> None:
    """Covers all calls of a search: models, tokenization of the question, and its greedy continuation."""
    [model] = await foreign.models()
    assert (model.id, model.kind) == (str(POLICY), "generate")
    [info] = await ours.models()
    assert (model.context, model.vocab_size) == (info.context, info.vocab_size)
    prompt = await foreign.tokenize(TokenizeRequest(model.id, MESSAGES))
    assert prompt == await ours.tokenize(TokenizeRequest("policy", MESSAGES))
    assert await foreign.tokenize(TokenizeRequest(model.id, "3 + 4")) == await ours.tokenize(
        TokenizeRequest("policy", "3 + 4")
    )

    greedy = generate(prompt, [Branch(1, 1, 60)], model=model.id, temperature=0.0)
    [theirs] = await collect(foreign, greedy)
    [expected] = await collect(ours, generate(prompt, [Branch(1, 1, 60)], model="policy", temperature=0.0))
    assert theirs.text == expected.text
    assert theirs.finish_reason == expected.finish_reason
    assert len(theirs.text) > 10
    assert theirs.prompt_tokens == len(prompt)

    cut = Branch(1, 1, 8)
    [first] = await collect(foreign, generate(prompt, [cut], model=model.id, temperature=0.0))
    assert first.finish_reason == "length"
    assert first.token_ids == await ours.tokenize(TokenizeRequest("policy", first.text))
    rest = Branch(1, 1, 60, generated=first.token_ids)
    [second] = await collect(foreign, generate(prompt, [rest], model=model.id, temperature=0.0))
    assert first.text + second.text == expected.text


async def test_streamed_text_of_transformers_serve_equals_the_completions(foreign: HttpEngine) -> None:
    prompt = await foreign.tokenize(TokenizeRequest(str(POLICY), MESSAGES))
    branches = [Branch(5, key, 12) for key in range(3)]
    events = [
        event
        async for event in foreign.generate(generate(prompt, branches, model=str(POLICY), stop=("\n",)), stream=True)
    ]
    completions = {event.index: event for event in events if isinstance(event, Completion)}
    assert sorted(completions) == [0, 1, 2]
    for index, completion in completions.items():
        deltas = [event.text for event in events if isinstance(event, Delta) and event.index == index]
        assert "".join(deltas) == completion.text
        assert completion.finish_reason in ("stop", "length")
        assert completion.logprob < 0


async def test_a_timeout_ends_a_branch_with_its_tokens_so_far(foreign: HttpEngine) -> None:
    prompt = await foreign.tokenize(TokenizeRequest(str(POLICY), MESSAGES))
    request = generate(prompt, [Branch(5, 1, 200), Branch(5, 2, 200)], model=str(POLICY), timeout=1e-6)
    assert [one.finish_reason for one in await collect(foreign, request)] == ["timeout"] * 2


async def test_unsupported_settings_are_named_in_errors(foreign: HttpEngine, transformers_url: str) -> None:
    prompt = await foreign.tokenize(TokenizeRequest(str(POLICY), MESSAGES))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"top_k": 3}, "cannot honour top_k"),
        ({"min_tokens": 3}, "cannot honour min_tokens"),
        ({"logprobs": 3}, "cannot honour logprobs"),
    ]
    for law, message in refused:
        with pytest.raises(EngineError, match=message):
            await collect(foreign, generate(prompt, [Branch(1, 1, 3)], model=str(POLICY), **law))
    salted = score(ScoreItem((prompt,), (0,)), token_ids=(1,), model=str(POLICY))
    for asking in (
        collect(foreign, generate(prompt, [Branch(1, 1, 3)], model=str(POLICY), cache_salt="mine")),
        foreign.score(replace(salted, cache_salt="mine")),
    ):
        with pytest.raises(EngineError, match="cannot keep caches apart by cache_salt"):
            await asking
    for asking in (
        collect(foreign, replace(generate(prompt, [Branch(1, 1, 3)], model=str(POLICY)), probe=True)),
        foreign.score(replace(salted, token_ids=(), probe=True)),
    ):
        with pytest.raises(EngineError, match="cannot read a probe, which needs the model's hidden states"):
            await asking
    bounded = ScoreItem((prompt,), (0,), KeyBound(200, 5))
    with pytest.raises(EngineError, match="cannot bound the keys of a thought: leave key_bound out"):
        await foreign.score(replace(salted, items=(bounded,)))
    assert [info.isolates for info in await foreign.models()] == [False]
    with pytest.raises(EngineError, match="cannot score"):
        await foreign.score(score(ScoreItem((prompt,), (0,)), token_ids=(1,), model=str(POLICY)))
    with pytest.raises(EngineError, match="cannot empty"):
        await foreign.clear_cache()
    await foreign.release("job")
    await foreign.abort("nobody")
    bare = HttpEngine(transformers_url)
    with pytest.raises(EngineError, match="name the folder"):
        await collect(bare, generate(prompt, [Branch(1, 1, 3)], model=str(POLICY)))
    with pytest.raises(EngineError, match="cannot tokenise"):
        await bare.tokenize(TokenizeRequest(str(POLICY), "a"))
    await bare.close()


Handler = Callable[[httpx.Request], httpx.Response]


def scripted(
    owner: str,
    answer: Handler,
    tokenizer: Path | None = None,
    throttle: Throttle | None = None,
    *,
    obeys_priorities: bool = False,
) -> HttpEngine:
    """Return a client of a server that owns its models as ``owner`` and answers other requests with ``answer``."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": owner, "max_model_len": 512}]})
        return answer(request)

    client = HttpEngine("http://foreign", tokenizer=tokenizer, throttle=throttle, obeys_priorities=obeys_priorities)
    client._connection._http = httpx.AsyncClient(base_url="http://foreign", transport=httpx.MockTransport(handle))
    return client


async def test_the_kind_of_a_server_is_asked_once_until_it_was_away() -> None:
    health = Health()
    health.add("http://foreign")
    asked: list[str] = []

    def engine() -> HttpEngine:
        def handle(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.path)
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 512}]})
            return httpx.Response(200, json={"tokens": [1, 2]})

        client = HttpEngine("http://foreign", kinds=health.kinds)
        client._connection._http = httpx.AsyncClient(base_url="http://foreign", transport=httpx.MockTransport(handle))
        return client

    for _ in range(3):  # as many jobs
        assert await engine().tokenize(TokenizeRequest("m", "ab")) == (1, 2)
    assert asked == ["/v1/models", "/tokenize", "/tokenize", "/tokenize"]
    health.record_failure("http://foreign", EngineUnavailable("gone"))
    await engine().tokenize(TokenizeRequest("m", "ab"))
    assert asked[4:] == ["/v1/models", "/tokenize"]


def chunks(*values: dict[str, Any]) -> httpx.Response:
    lines = [f"data: {json.dumps(value)}\n\n" for value in values]
    return httpx.Response(200, content="".join([*lines, "data: [DONE]\n\n"]).encode())


def piece(text: str, ids: list[int] | None = None, logprob: float | None = None, **more: object) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": None, **more}
    if ids is not None:
        choice["token_ids"] = ids
    if logprob is not None:
        choice["logprobs"] = {"token_logprobs": [logprob]}
    return {"choices": [choice]}


async def test_llama_cpp_gets_token_ids_and_every_filter_that_has_a_default_there() -> None:
    """Its server would keep the 40 likeliest tokens, those above 5 % of the best, where a request leaves it out."""
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx": 1024}}]})
        bodies.append(json.loads(request.content))
        return chunks(piece("Reach", finish_reason="length"))

    client = scripted("llamacpp", answer, tokenizer=POLICY)
    client._connection._http = httpx.AsyncClient(base_url="http://foreign", transport=httpx.MockTransport(answer))
    [info] = await client.models()
    assert (info.context, info.capabilities, info.extra["server"]) == (1024, frozenset(), "llamacpp")
    [one] = await collect(client, generate((5, 6), [Branch(1, 1, 9)]))
    assert one.text == "Reach"
    [body] = bodies
    assert (body["prompt"], body["top_k"], body["min_p"]) == ([5, 6], -1, 0.0)
    await client.close()


async def test_vllm_gets_token_ids_and_one_request_per_branch() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        usage = {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 3},
        }
        return chunks(
            piece("a", [7], -0.5),
            piece("b\n", [8], -0.25, finish_reason="stop", stop_reason="\n"),
            {"choices": [], "usage": usage},
        )

    client = scripted("vllm", answer)
    branches = [Branch(1, 1, 9), Branch(1, 2, 8, generated=(4,))]
    law = {"top_k": 3, "min_p": 0.1, "stop": ("\n",), "ignore_eos": True, "logit_bias": ((5, 1.0),)}
    first, second = await collect(client, generate((5, 6), branches, **law))
    assert first == Completion(0, (7, 8), "ab\n", "stop", "\n", -0.75, 2, 2, drafted_tokens=4, accepted_tokens=1)
    assert second.prompt_tokens == 3
    by_length = sorted(bodies, key=lambda body: len(body["prompt"]))
    assert [body["prompt"] for body in by_length] == [[5, 6], [5, 6, 4]]
    assert [body["max_tokens"] for body in by_length] == [9, 8]
    assert [body["seed"] for body in by_length] == [branch_seed(branch) for branch in branches]
    sent = by_length[0]
    assert (sent["top_k"], sent["min_p"], sent["ignore_eos"], sent["logit_bias"]) == (3, 0.1, True, {"5": 1.0})
    assert sent["return_token_ids"]
    assert sent["include_stop_str_in_output"]
    assert not {"request_id", "branches", "stream_choices", "lease", "priority"} & set(sent)
    await client.close()


@pytest.mark.parametrize(
    ("owner", "obeys", "expected"),
    [("vllm", True, 1), ("sglang", True, -1), ("vllm", False, None), ("sglang", False, None), ("llamacpp", True, None)],
)
async def test_a_priority_is_sent_in_the_servers_own_sense_where_it_was_started_to_obey_it(
    owner: str, obeys: bool, expected: int | None
) -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return chunks(piece("a", finish_reason="length"))

    client = scripted(owner, answer, tokenizer=POLICY, obeys_priorities=obeys)
    for priority in (-1, 0):
        await collect(client, replace(generate((5, 6), [Branch(1, 1, 9)]), priority=priority))
    assert [body.get("priority") for body in bodies] == [expected, None]
    await client.close()


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
async def test_the_salt_is_sent_to_servers_that_isolate_caches_by_it(owner: str) -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [7]})
        if bodies[-1].get("stream"):
            return chunks(piece("a", finish_reason="length"))
        likeliest = {"logprobs": {"top_logprobs": [{"token_id:7": -0.5}]}}
        return httpx.Response(200, json={"choices": [likeliest], "usage": {"prompt_tokens": 2}})

    client = scripted(owner, answer)
    assert [info.isolates for info in await client.models()] == [True]
    for salt in ("ann", None):
        await collect(client, generate((5, 6), [Branch(1, 1, 9)], cache_salt=salt))
        assert bodies.pop(0).get("cache_salt") == salt
        bodies.clear()
    if owner == "vllm":
        asked = score(ScoreItem(((5, 6),), (0,)), token_ids=(7,))
        await client.score(replace(asked, cache_salt="ann"))
        await client.score(asked)
        assert [body.get("cache_salt") for body in bodies] == ["ann", None]
    await client.close()


async def test_sglang_text_is_tokenized_since_it_returns_no_token_ids() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            assert (body["prompt"], body["add_special_tokens"]) == ("ab", False)
            return httpx.Response(200, json={"tokens": [7, 8]})
        assert body["no_stop_trim"]
        return chunks(piece("a"), piece("b", finish_reason="stop", matched_stop=9))

    client = scripted("sglang", answer)
    [one] = await collect(client, generate((5, 6), [Branch(1, 1, 9)]))
    assert (one.token_ids, one.text, one.finish_reason, one.stop) == ((7, 8), "ab", "stop", 9)
    assert one.logprob < 0
    with pytest.raises(EngineError, match="chat messages"):
        await client.tokenize(TokenizeRequest("m", MESSAGES))
    [model] = await client.models()
    assert (model.context, model.extra) == (512, {"server": "sglang"})
    await client.close()


async def test_aborting_ends_branches_with_their_tokens_so_far() -> None:
    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield f"data: {json.dumps(piece('a', [7]))}\n\n".encode()
            await client.abort("r")
            while True:
                yield f"data: {json.dumps(piece('b', [8]))}\n\n".encode()
                await asyncio.sleep(0)

    client = scripted("vllm", lambda _: httpx.Response(200, stream=Endless()))
    [one] = await collect(client, generate((5, 6), [Branch(1, 1, 1 << 20)]))
    assert (one.finish_reason, one.text[:1]) == ("cancelled", "a")
    await client.close()


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (httpx.Response(400, json={"detail": "prompt must be a string."}), InvalidRequest),
        (httpx.Response(400, json={"error": {"message": "too long", "code": 400}}), InvalidRequest),
        (httpx.Response(503, json={"error": "dead"}), EngineUnavailable),
        (httpx.Response(500, content=b"Internal Server Error"), EngineUnavailable),
        (chunks({"error": "out of memory"}), EngineError),
    ],
)
async def test_server_failures_become_the_exceptions_of_the_interface(
    response: httpx.Response, expected: type[EngineError]
) -> None:
    client = scripted("vllm", lambda _: response)
    with pytest.raises(expected):
        await collect(client, generate((5, 6), [Branch(1, key, 9) for key in range(1)]))
    await client.close()


def test_seeds_differ_between_branches_and_between_continuations() -> None:
    branches = [Branch(seed, key, 5, (3,) * length) for seed in (0, -1) for key in range(20) for length in range(5)]
    seeds = [branch_seed(branch) for branch in branches]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 31 for seed in seeds)
    assert seeds == [branch_seed(branch) for branch in branches]


def test_the_routers_of_vllm_and_sglang_are_told_the_job() -> None:
    assert routing_headers("r", "job") == {"X-Request-Id": "r", "X-Session-ID": "job", "X-SMG-Routing-Key": "job"}
    assert routing_headers("r", None) == {"X-Request-Id": "r"}


def test_an_unknown_dialect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="reasoner, vllm, sglang, llamacpp, openai"):
        HttpEngine("http://x", dialect="french")


async def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    client = scripted("openai", lambda _: chunks(), tokenizer=tmp_path)
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        await client.models()
    await client.close()
