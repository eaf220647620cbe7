"""LiteLLM's proxy before a real vLLM: the client of chat servers, and a job of the whole service."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.roles.supervisor import free_port
from engine.protocol.types import Branch, Completion, EngineBusy, EngineError, InvalidRequest, TokenizeRequest
from engine.remote.chat.options import ChatOptions
from engine.remote.http import HttpEngine
from engine.remote.local_tokenizer import load_tokenizer
from tests.engine.helpers import generate
from tests.engine.remote.vllm_cases import QUESTION, connect
from tests.vllm.servers import POLICY, ROOT, Server, Servers, running, serving
from tests.vllm.test_service import PROBLEM

ENVIRONMENT = ROOT / os.environ.get("LITELLM_ENVIRONMENT", "build/litellm")
KEY = "sk-master-of-the-tests"
_WRONG = "sk-nobody-knows-this"
_ALLOWED = 2
_CONFIG = """
model_list:
  - model_name: policy
    litellm_params: {{model: hosted_vllm/policy, api_base: {url}/v1, api_key: none}}
  - model_name: limited
    litellm_params: {{model: hosted_vllm/policy, api_base: {url}/v1, api_key: none, rpm: {allowed}}}
router_settings:
  num_retries: 0
  optional_pre_call_checks: [enforce_model_rate_limits]
general_settings:
  master_key: {key}
"""
_SETTINGS = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
"""No table of prices and no tokenizer from the network."""
_SERVICE = """
model = "policy"

[engines.litellm]
url = "{url}/v1"
kind = "chat"
models = ["policy"]
api_key_env = "LITELLM_MASTER_KEY"
context = 512
"""


@pytest.fixture(scope="module")
def proxy(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    program = ENVIRONMENT / "bin" / "litellm"
    if not program.exists():
        pytest.skip(f"LiteLLM is not installed in {ENVIRONMENT}: run make test-vllm where its packages can be had")
    folder = tmp_path_factory.mktemp("litellm")
    (folder / "config.yaml").write_text(_CONFIG.format(url=servers.policy.url, allowed=_ALLOWED, key=KEY))
    port = free_port()
    command = [str(program), "--config", str(folder / "config.yaml"), "--telemetry", "False"]
    place = ("--host", "127.0.0.1", "--port", str(port))
    server = Server(folder / "log", [*command, *place], port, _SETTINGS, "/health/liveliness")
    with running(server):
        yield server


async def ask(proxy: Server, *, key: str = KEY, model: str = "policy", **more: object) -> Completion:
    """Return an answer of 24 tokens to the question, twice in one message so that it fills a block of the cache."""
    engine = HttpEngine(f"{proxy.url}/v1", api_key=key, dialect="chat", chat=ChatOptions(context=512))
    try:
        messages = [QUESTION[0] | {"content": QUESTION[0]["content"] * 2}]
        prompt = await engine.tokenize(TokenizeRequest(model, messages))
        request = generate(prompt, [Branch(1, 1, 24)], model=model, **more)  # type: ignore[arg-type]
        [completion] = [event async for event in engine.generate(request) if isinstance(event, Completion)]
        return completion
    finally:
        await engine.close()


async def test_an_answer_has_the_text_and_the_usage_of_the_server_behind(proxy: Server, servers: Servers) -> None:
    through, again = await ask(proxy, temperature=0.0), await ask(proxy, temperature=0.0)
    vllm = connect(servers.policy.url, "policy")
    prompt = await vllm.tokenize(TokenizeRequest("policy", [QUESTION[0] | {"content": QUESTION[0]["content"] * 2}]))
    request = generate(prompt, [Branch(1, 1, 24)], model="policy", temperature=0.0)
    [direct] = [event async for event in vllm.generate(request) if isinstance(event, Completion)]
    await vllm.close()
    assert through.text == again.text == direct.text
    assert len(through.token_ids) == len(direct.token_ids) == 24
    assert through.prompt_tokens == len(prompt)
    assert again.cached_tokens == 32  # the one whole block


async def test_a_wrong_key_is_refused_in_our_words_and_without_the_key(proxy: Server) -> None:
    with pytest.raises(EngineError, match=r"refused the request's API key .* api_key_file") as caught:
        await ask(proxy, key=_WRONG)
    assert _WRONG not in str(caught.value)
    assert proxy.url in str(caught.value)


async def test_a_model_that_the_proxy_does_not_know_is_named(proxy: Server) -> None:
    with pytest.raises(InvalidRequest, match="nowhere"):
        await ask(proxy, model="nowhere")


async def test_the_limit_of_the_proxy_hands_the_job_back_with_the_time_to_wait(proxy: Server) -> None:
    async def ask_too_often() -> None:
        for _ in range(2 * _ALLOWED + 1):  # one more than two minutes allow
            await ask(proxy, model="limited")

    with pytest.raises(EngineBusy, match="RPM limit=2") as caught:
        await ask_too_often()
    assert caught.value.retry_after == 60


async def test_the_completions_api_of_the_proxy_works_with_texts(proxy: Server, servers: Servers) -> None:
    """It refuses a prompt of token ids, so that the client needs the folder of the tokenizer."""
    request = generate(load_tokenizer(POLICY).encode(PROBLEM), [Branch(1, 1, 24)], model="policy", temperature=0.0)
    texts = []
    for url, key, dialect in ((proxy.url, KEY, "openai"), (servers.policy.url, None, "vllm")):
        engine = HttpEngine(url, api_key=key, dialect=dialect, tokenizer=POLICY)
        texts += [event.text async for event in engine.generate(request) if isinstance(event, Completion)]
        await engine.close()
    assert texts[0] == texts[1] != ""


def test_jobs_run_through_the_proxy(proxy: Server, tmp_path: Path) -> None:
    with serving(tmp_path, {"LITELLM_MASTER_KEY": KEY}, _SERVICE.format(url=proxy.url)) as service:
        for strategy, verifier in (
            ("self_consistency", None),
            ("best_of_n", {"kind": "regex", "pattern": "[0-9 +*/()=-]+"}),
        ):
            spec = {} if verifier is None else {"verifier": verifier}
            job = service.submit(PROBLEM, wait=120, strategy={"name": strategy, "n": 4}, seed=1, **spec)
            assert job["status"] == "completed", job
            assert job["usage"]["generated"] > 0
            assert job["usage"]["prompt"] > 0
        assert KEY not in service.log.read_text()
