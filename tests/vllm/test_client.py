"""The interface of engines on a real vLLM; its answers become those of the ordinary tests with ``RECORD=1``."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from engine.protocol.types import Branch, Completion, Delta, TokenizeRequest
from tests.engine.helpers import generate
from tests.engine.remote.recordings import Recorder
from tests.engine.remote.vllm_cases import QUESTION, Case, connect, our_engine, parameters, recording
from tests.listening import listening
from tests.vllm.servers import Servers

RUNNING = "vllm:num_requests_running"
GENERATED = "vllm:generation_tokens_total"


@pytest.mark.parametrize(("server", "case"), parameters())
async def test_vllm_gives_the_results_of_our_engine(
    server: str, case: Case, servers: Servers, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    asked = request.getfixturevalue("every_token") if server == "prm" else getattr(servers, server)
    recorder = Recorder(asked.url)
    ours = our_engine(server)
    with listening(recorder.app, tmp_path / "s") as url:
        vllm = connect(url, server)
        await case(vllm, ours)
        await vllm.close()
    await ours.close()
    if os.environ.get("RECORD"):
        recorder.write(recording(case))


async def test_an_abort_ends_the_work_of_the_server(servers: Servers) -> None:
    vllm = connect(servers.policy.url, "policy")
    prompt = await vllm.tokenize(TokenizeRequest("policy", QUESTION))
    # Four times as many as the server runs at once, so that much is left to do however late the abort comes.
    branches = [Branch(1, key, 400, (), (1, key)) for key in range(256)]
    request = generate(prompt, branches, model="policy", request_id="long", ignore_eos=True)
    before, arrived = servers.policy.metric(GENERATED), 0
    completions: list[Completion] = []
    async for event in vllm.generate(request, stream=True):
        if isinstance(event, Completion):
            completions.append(event)
        elif isinstance(event, Delta):
            arrived += 1
            if arrived == 20:
                await vllm.abort("long")
    await vllm.close()
    async with asyncio.timeout(30):
        while servers.policy.metric(RUNNING):
            await asyncio.wait([asyncio.create_task(asyncio.to_thread(servers.policy.metric, RUNNING))])
    made = servers.policy.metric(GENERATED) - before
    received = sum(len(one.token_ids) for one in completions)
    assert [one.finish_reason for one in completions] == ["cancelled"] * 256
    assert 20 <= received <= made < 256 * 400 / 2


async def test_a_timeout_keeps_what_has_arrived(servers: Servers) -> None:
    vllm = connect(servers.policy.url, "policy")
    prompt = await vllm.tokenize(TokenizeRequest("policy", QUESTION))
    branches = [Branch(1, key, 400, (), (1, key)) for key in range(32)]
    request = generate(prompt, branches, model="policy", ignore_eos=True, timeout=1.5)
    completions = [event async for event in vllm.generate(request) if isinstance(event, Completion)]
    await vllm.close()
    assert [one.finish_reason for one in completions] == ["timeout"] * 32
    assert 0 < sum(len(one.token_ids) for one in completions) < 32 * 400
