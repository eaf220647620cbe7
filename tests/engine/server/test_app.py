"""The engine server: results equal to in-process ones, streams, health and metrics."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.types import Message

from engine.core.local_engine import LocalEngine
from engine.protocol.constraint import Constraint
from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    EngineError,
    InvalidRequest,
    KeyBound,
    SamplingParams,
    ScoreItem,
    TokenizeRequest,
)
from engine.remote.http import HttpEngine
from engine.server.app import create_app
from engine.server.openai import _keep_alive
from tests.engine.conftest import TEMPLATE, Checkpoints
from tests.engine.helpers import generate, score
from tests.engine.probes import plant_probe
from tests.engine.server.calls import OPTIONS, PROMPT, collect, openai_body, sampled
from tests.engine.serving import served


async def test_tokens_over_http_equal_those_in_process(client: HttpEngine, engine: LocalEngine) -> None:
    over_http, in_process = await collect(client, sampled()), await collect(engine, sampled())
    assert [one.token_ids for one in over_http] == [one.token_ids for one in in_process]
    assert [(one.text, one.finish_reason, one.prompt_tokens) for one in over_http] == [
        (one.text, one.finish_reason, one.prompt_tokens) for one in in_process
    ]


async def test_a_continued_branch_is_transferred_completely(client: HttpEngine) -> None:
    [whole] = await collect(client, sampled(1))
    rest = Branch(seed=3, key=0, max_tokens=13, generated=whole.token_ids[:7])
    [second] = await collect(client, generate(PROMPT, [rest], temperature=0.9, top_p=0.97, ignore_eos=True))
    assert second.token_ids == whole.token_ids[7:]


async def test_a_stream_over_http_equals_its_completions(client: HttpEngine) -> None:
    events = [event async for event in client.generate(sampled(), stream=True)]
    for completion in [event for event in events if isinstance(event, Completion)]:
        deltas = [event for event in events if isinstance(event, Delta) and event.index == completion.index]
        assert "".join(delta.text for delta in deltas) == completion.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == completion.token_ids


async def test_texts_with_any_line_break_are_transferred_unchanged(
    client: HttpEngine, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\n\tb🐢"
    monkeypatch.setattr(engine._cores["m"].model.tokenizer, "decode", lambda tokens: text * bool(tokens))
    for stream in (False, True):
        [answer] = [event async for event in client.generate(sampled(1, 1), stream=stream)][-1:]
        assert isinstance(answer, Completion)
        assert answer.text == text


async def test_scores_over_http_equal_those_in_process(client: HttpEngine, engine: LocalEngine) -> None:
    request = score(ScoreItem(("step one: ", (5, 6, 7), "add"), (2, 0)), ScoreItem(("x",), (0,)), model="prm")
    over_http, in_process = await client.score(request), await engine.score(request)
    assert [one.values for one in over_http] == [one.values for one in in_process]
    declined = await client.score(score(ScoreItem((PROMPT,), (0,)), token_ids=(1,), max_compute=0))
    assert declined[0].values is None


async def test_scores_with_bounded_keys_over_http_equal_those_in_process(
    client: HttpEngine, engine: LocalEngine
) -> None:
    tokens = tuple(3 + place * 7 % 300 for place in range(150))
    bound = KeyBound(96, 20, (299,), (1 << 64) - 1)
    values = []
    for key_bound in (bound, None):
        request = score(ScoreItem((tokens,), (0,), key_bound), token_ids=(1, 2))
        await engine.clear_cache()
        [over_http] = await client.score(request)
        await engine.clear_cache()
        [in_process] = await engine.score(request)
        assert over_http.values == in_process.values
        values.append(over_http.values)
    assert values[0] != values[1]
    with pytest.raises(InvalidRequest, match="give 96 at least"):
        await client.score(score(ScoreItem((tokens,), (0,), replace(bound, budget=50)), token_ids=(1, 2)))


async def test_models_and_token_ids_over_http_equal_those_in_process(client: HttpEngine, engine: LocalEngine) -> None:
    assert await client.models() == await engine.models()
    messages = [{"role": "user", "content": "add 3 and 4"}]
    assert await client.tokenize(TokenizeRequest("m", messages)) == await engine.tokenize(
        TokenizeRequest("m", messages)
    )
    assert await client.tokenize(TokenizeRequest("m", "add 3")) == await engine.tokenize(TokenizeRequest("m", "add 3"))
    assert TEMPLATE


async def test_aborting_over_http_returns_what_was_generated(client: HttpEngine) -> None:
    request = generate(PROMPT, [Branch(1, 1, 200)], request_id="long", ignore_eos=True)
    reasons = []
    async for event in client.generate(request, stream=True):
        if isinstance(event, Delta):
            await client.abort("long")
        else:
            reasons.append((event.finish_reason, 0 < len(event.token_ids) <= 200))
    assert reasons[0][1]
    await client.abort("nobody")


async def test_closing_the_iterator_cancels_the_request(client: HttpEngine, engine: LocalEngine) -> None:
    events = client.generate(generate(PROMPT, [Branch(1, 1, 200)], ignore_eos=True), stream=True)
    await anext(events)
    await events.aclose()  # type: ignore[attr-defined]
    await settled(engine)


@pytest.mark.parametrize("form", [{}, {"stream": True}, {"stream_choices": True}])
async def test_a_disconnected_client_cancels_its_request(
    address: str, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, form: dict[str, bool]
) -> None:
    core, gate = engine._cores["m"], threading.Event()
    launch, before = core.launch, core.stats.generated_tokens
    monkeypatch.setattr(core, "launch", lambda: (gate.wait(30), launch()))
    body = json.dumps({"model": "m", "prompt": "add", "n": 8, "max_tokens": 200, "ignore_eos": True} | form)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: e\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    _, writer = await asyncio.open_unix_connection(address.removeprefix("unix://"))
    writer.write(f"{head}\r\n\r\n{body}".encode())
    while not core.has_work:  # noqa: ASYNC110
        await asyncio.sleep(0)
    writer.close()
    # The engine is paused until the server has cancelled the request.
    while not engine._inbox:  # noqa: ASYNC110
        await asyncio.sleep(0)
    gate.set()
    await settled(engine)
    assert core.stats.generated_tokens - before <= 8


async def test_a_client_disconnect_is_not_logged_as_a_server_error(engine: LocalEngine) -> None:
    body = {"model": "m", "prompt": ["add", "and"], "max_tokens": 200, "ignore_eos": True, "stream": True}
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return messages.pop(0)

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    await create_app(engine)(scope | {"headers": [(b"content-type", b"application/json")]}, receive, send)
    assert sent[0]["status"] == 200
    await settled(engine)


async def test_a_failing_step_is_reported_to_the_client_and_the_server_continues(
    client: HttpEngine, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("engine.core.step.sample_and_score", lambda *_, **__: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await collect(client, sampled())
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await client.score(score(ScoreItem((PROMPT,), (0,)), token_ids=(1,)))
    assert len(await collect(client, sampled())) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_end_of_a_constraint_is_refused_to_its_client_and_empties_no_cache(
    client: HttpEngine, http: httpx.AsyncClient, engine: LocalEngine, stream: bool
) -> None:
    await collect(client, sampled())
    [letter] = engine.tokenizer("m").encode("a")
    dead_end = Constraint("grammar", 'start: "a" /[a-z&&[^a-z]]/ | "b" /[0-9]{9}/')
    request = replace(sampled(), constraint=dead_end, sampling=SamplingParams(logit_bias=((letter, 100.0),)))
    with pytest.raises(InvalidRequest, match="cannot be followed here"):
        [event async for event in client.generate(request, stream=stream)]
    body = {"model": "m", "prompt": list(PROMPT), "structured_outputs": {"grammar": dead_end.value}}
    answer = await http.post("/v1/completions", json=body | {"logit_bias": {str(letter): 100.0}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "constraint")
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    answer = await http.post("/v1/completions", json=body | {"structured_outputs": {"json": loop}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "constraint")
    [again, *_] = await collect(client, sampled())
    assert again.cached_tokens >= len(PROMPT) - 1


async def test_leases_are_sent_with_requests_and_released(
    client: HttpEngine, engine: LocalEngine, http: httpx.AsyncClient
) -> None:
    await collect(client, generate(PROMPT, [Branch(1, 1, 20)], pin_key="job", priority=3, ignore_eos=True))
    await client.score(score(ScoreItem((PROMPT,), (0,)), model="prm", pin_key="job"))
    assert [stats.pins for stats in engine.stats().values()] == [1, 1]
    lines = (await http.get("/metrics")).text.splitlines()
    assert 'reasoner_engine_leases{model="m"} 1.0' in lines
    assert 'reasoner_engine_pinned_tokens{model="prm"} 48.0' in lines
    await client.release("job", (*PROMPT, 1))
    await client.release("job")
    await client.release("unheard of")
    await collect(client, generate((5, 6), [Branch(1, 1, 1)]))
    assert [stats.pins for stats in engine.stats().values()] == [0, 0]


async def test_the_salt_is_sent_with_a_request(client: HttpEngine) -> None:
    salted = generate((*PROMPT[::-1], 9), [Branch(1, 1, 3)], cache_salt="mine")
    cached = [(await collect(client, request))[0].cached_tokens for request in (salted, salted)]
    assert cached == [0, len(PROMPT)]


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "lease"), ({"lease": ""}, "lease"), ({"lease": "a", "tokens": "all"}, "tokens"), ({"job": "a"}, "job")],
)
async def test_an_invalid_release_names_its_field(http: httpx.AsyncClient, body: dict[str, object], field: str) -> None:
    answer = await http.post("/v1/leases/release", json=body)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


async def test_health_reports_why_an_engine_stopped(checkpoints: Checkpoints) -> None:
    engine = LocalEngine({"m": checkpoints("qwen3")}, OPTIONS)
    engine._cores["m"].cache.tree.num_evictable += 1
    await collect(engine, generate(PROMPT, [Branch(1, 1, 2)]))
    await asyncio.to_thread(engine._thread.join)
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        answer = await http.get("/healthz")
    assert answer.status_code == 503
    assert "evictable pages" in answer.json()["status"]
    await engine.close()


async def test_a_stream_of_a_silent_engine_has_keep_alives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.openai._KEEP_ALIVE_SECONDS", 0.0)
    may_answer = asyncio.Event()

    async def answer() -> AsyncGenerator[str, None]:
        await may_answer.wait()
        yield "data: [DONE]\n\n"

    stream = _keep_alive(answer())
    assert await anext(stream) == ": keep-alive\n\n"
    may_answer.set()
    assert [event async for event in stream][-1] == "data: [DONE]\n\n"


async def test_keep_alives_are_ignored_by_the_client(client: HttpEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    async def keep_alive(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        nonlocal sent
        async for chunk in chunks:
            sent += 1
            yield ": keep-alive\n\n"
            yield chunk

    monkeypatch.setattr("engine.server.openai._keep_alive", keep_alive)
    assert len(await collect(client, sampled())) == 4
    assert sent >= 4


async def settled(engine: LocalEngine) -> None:
    """Wait until no request is running; the test's own time limit bounds the wait."""
    while any(stats.running or stats.waiting for stats in engine.stats().values()):  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_concurrent_requests_get_their_own_results(client: HttpEngine, engine: LocalEngine) -> None:
    requests = [generate((*PROMPT[:5], key), [Branch(1, key, 6)], request_id=str(key)) for key in range(5, 69)]
    answers = await asyncio.gather(*(collect(client, request) for request in requests[:40]))
    assert [one.token_ids for [one] in answers] == [
        (await collect(engine, request))[0].token_ids for request in requests[:40]
    ]


async def test_openai_completions_contain_text_usage_and_token_ids(
    http: httpx.AsyncClient, engine: LocalEngine
) -> None:
    body = {"model": "m", "prompt": "add 3", "n": 3, "max_tokens": 5, "seed": 1, "return_token_ids": True}
    answer = (await http.post("/v1/completions", json=body | {"ignore_eos": True})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert all(len(choice["token_ids"]) == 5 and choice["logprob_sum"] < 0 for choice in answer["choices"])
    prompt = len(await engine.tokenize(TokenizeRequest("m", "add 3")))
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (prompt, 15)
    assert answer["object"] == "text_completion"


async def test_a_prompt_of_token_ids_is_used_unchanged(http: httpx.AsyncClient, client: HttpEngine) -> None:
    body = {"model": "m", "prompt": list(PROMPT), "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = (await http.post("/v1/completions", json=body)).json()
    [ours] = await collect(client, generate(PROMPT, [Branch(0, 0, 8)], temperature=0.0))
    assert tuple(answer["choices"][0]["token_ids"]) == ours.token_ids


async def test_an_openai_stream_equals_the_whole_response(http: httpx.AsyncClient) -> None:
    [free] = (await http.post("/v1/completions", json=openai_body())).json()["choices"]
    stop = free["text"][4:6]
    for extra in ({}, {"include_stop_str_in_output": True}):
        body = openai_body() | {"stop": stop} | extra
        whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        lines = (await http.post("/v1/completions", json=body | usage)).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert (stop in whole["text"]) == bool(extra)
        assert chunks[-1]["usage"]["completion_tokens"] > 0
        assert choices[-1]["finish_reason"] == whole["finish_reason"] == "stop"
        assert whole["stop_reason"] == stop


@pytest.mark.parametrize("stop", ["a", "af", " "])
async def test_text_before_an_excluded_stop_string_is_complete(
    http: httpx.AsyncClient, engine: LocalEngine, stop: str
) -> None:
    """The string is in the first ``min_tokens`` tokens too, where it does not stop."""
    tokenizer = engine.tokenizer("m")
    likely = {token: 100 for token in range(360) if tokenizer.piece(token) in ("a", "f", " ")}
    body = openai_body() | {"prompt": [5, 6, 7], "min_tokens": 12, "stop": [stop]}
    body |= {"logit_bias": likely, "temperature": 2}

    async def answer(**extra: object) -> tuple[str, int]:
        whole = (await http.post("/v1/completions", json=body | extra)).json()
        return whole["choices"][0]["text"], whole["usage"]["completion_tokens"]

    compared = 0
    for seed in range(20):
        body["seed"] = seed
        first, _ = await answer(stop=[], max_tokens=11, min_tokens=0)
        whole, tokens = await answer(include_stop_str_in_output=True)
        if stop not in first or tokens == 40:
            continue
        before, _ = await answer(stop=[], max_tokens=tokens - 1)
        expected = whole[: whole.index(stop, max(0, len(before) - len(stop) + 1))]
        assert stop in expected
        assert await answer() == (expected, tokens)
        lines = (await http.post("/v1/completions", json=body | {"stream": True})).text.split("\n\n")[:-2]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
        compared += 1
        if compared == 2:
            return
    raise AssertionError("no text has the string on both sides of the minimum")


async def test_health_and_metrics_report_completed_work(http: httpx.AsyncClient, client: HttpEngine) -> None:
    await collect(client, sampled())
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    lines = (await http.get("/metrics")).text.splitlines()
    numbers = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    assert numbers['reasoner_engine_generated_tokens_total{model="m"}'] >= 80
    assert 0 < numbers['reasoner_engine_hit_rate{model="m"}'] < 1
    assert numbers['reasoner_engine_running{model="m"}'] == 0


async def test_metrics_count_waits_token_times_and_finish_reasons_once_per_branch(
    http: httpx.AsyncClient, client: HttpEngine
) -> None:
    async def numbers() -> dict[str, float]:
        lines = (await http.get("/metrics")).text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = await numbers()
    await collect(client, sampled(4))
    await collect(client, sampled(2, max_tokens=1))
    await client.score(score(ScoreItem((PROMPT,), (0,)), token_ids=(1,)))
    after = await numbers()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    prefix, model = "reasoner_engine_", '{model="m"}'
    assert grown[f"{prefix}queue_seconds_count{model}"] == 7
    assert grown[f"{prefix}time_to_first_token_seconds_count{model}"] == 6
    assert grown[f"{prefix}time_per_output_token_seconds_count{model}"] == 4
    assert grown[prefix + 'finished_total{model="m",reason="length"}'] == 6
    assert grown[prefix + 'requests_total{kind="generate",model="m"}'] == 2
    assert grown[prefix + 'requests_total{kind="score",model="m"}'] == 1
    waits = [after[name] for name in after if name.startswith(f"{prefix}time_to_first_token_seconds_bucket{{")]
    infinite = prefix + 'time_to_first_token_seconds_bucket{le="+Inf",model="m"}'
    assert after[infinite] == after[f"{prefix}time_to_first_token_seconds_count{model}"] == max(waits)
    first = after[f"{prefix}time_to_first_token_seconds_sum{model}"]
    assert first >= after[f"{prefix}queue_seconds_sum{model}"] * 0.5 > 0


async def test_probe_scores_over_http_equal_those_in_process(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Over our own protocol and in OpenAI's shape."""
    plant_probe(checkpoints("qwen3"), tmp_path / "probe")
    options = replace(OPTIONS, probe=str(tmp_path / "probe"), deterministic=True)
    local = LocalEngine({"m": checkpoints("qwen3")}, options)
    with served(local, tmp_path / "engine.sock") as address:
        client = HttpEngine(address)
        request = replace(sampled(), probe=True)
        in_process, over_http = await collect(local, request), await collect(client, request)
        assert [one.probe for one in over_http] == [one.probe for one in in_process]
        assert all(one.probe is not None for one in in_process)
        assert await client.models() == await local.models()
        tokens = (*request.prompt, *in_process[0].token_ids[:-1])
        [read] = await client.score(replace(score(ScoreItem((tokens,), (0,))), probe=True))
        assert read.values == ((in_process[0].probe,),)
        transport = httpx.AsyncHTTPTransport(uds=address.removeprefix("unix://"))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
            answer = await http.post("/v1/completions", json=openai_body() | {"probe": True})
        assert 0 < answer.json()["choices"][0]["probe"] < 1
        await client.close()
