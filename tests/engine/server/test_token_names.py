"""Names, offsets and alternatives of tokens in OpenAI's log-probabilities, with SentencePiece's vocabularies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from engine.core.local_engine import LocalEngine
from engine.protocol.types import TokenLogprob
from engine.server.app import create_app
from engine.server.token_names import TokenNamer
from engine.text.tokenizer import Tokenizer
from tests.engine.server.test_openai import OPTIONS
from tests.engine.text import sentencepiece

KINDS = ["llama", "gemma", "metaspace"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in made.items():
        sentencepiece.save(kind, folder)
    return made


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[LocalEngine]:
    local = LocalEngine(folders, OPTIONS)
    yield local
    asyncio.run(local.close())


@pytest.fixture
async def http(engine: LocalEngine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(base_url="http://engine", transport=transport, timeout=60) as client:
        yield client


async def complete(http: httpx.AsyncClient, **body: Any) -> Any:
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def stream(http: httpx.AsyncClient, **body: Any) -> tuple[str, dict[str, list[Any]]]:
    """Return the joined text and log-probabilities of a stream."""
    text = ""
    joined: dict[str, list[Any]] = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    response = await http.post("/v1/completions", json=body | {"stream": True})
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            text += choice["text"]
            for name in joined if choice["logprobs"] else ():
                joined[name] += choice["logprobs"][name]
    return text, joined


WRITTEN = [" cat", " cat sat.", "cat", "\n a", " 你好 a", " 🐢s."]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("echo", [False, True])
async def test_each_token_stands_at_its_offset_in_the_text(
    http: httpx.AsyncClient, folders: dict[str, Path], kind: str, written: str, echo: bool
) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folders[kind])
    choices = {"choice": [written]}
    body: dict[str, Any] = {"model": kind, "prompt": "the", "max_tokens": 40, "logprobs": 3, "echo": echo, "seed": 1}
    body |= {"structured_outputs": choices, "temperature": 1.0}
    whole = await complete(http, **body, return_token_ids=True)
    assert whole["text"] == ("the" if echo else "") + written
    logprobs = whole["logprobs"]
    special = set(theirs.all_special_tokens)
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert 0 <= offset <= len(whole["text"])
        if name not in special and not name.startswith("token_id:"):
            assert whole["text"].startswith(name, offset)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert all(name in top for name, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True) if top)
    if not echo:  # log-probabilities of a prompt are not streamed
        assert await stream(http, **body) == (whole["text"], logprobs)


@pytest.mark.parametrize("kind", KINDS)
async def test_names_of_plain_texts_join_to_the_text(http: httpx.AsyncClient, kind: str) -> None:
    body: dict[str, Any] = {"model": kind, "prompt": "the cat", "max_tokens": 0, "logprobs": 0, "echo": True}
    scored = await complete(http, **body)
    assert scored["text"] == "the cat"
    assert "".join(scored["logprobs"]["tokens"]) == "<s>the cat"
    assert scored["logprobs"]["text_offset"][:2] == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logprobs", [1, 5, 20])
async def test_there_is_an_entry_for_each_of_the_likeliest_tokens(
    http: httpx.AsyncClient, folders: dict[str, Path], kind: str, logprobs: int
) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folders[kind])
    same = theirs.convert_tokens_to_ids(["A", "<0x41>", "<0x61>", "a", "<0xE4>", "<0xE5>", "<s>", "<|end|>"])
    bias = {str(token): 100.0 for token in same}
    body: dict[str, Any] = {"model": kind, "prompt": "the", "max_tokens": 6, "logprobs": logprobs, "seed": 3}
    choice = await complete(http, **body, logit_bias=bias, ignore_eos=True, return_token_ids=True)
    for name, top, own in zip(
        choice["logprobs"]["tokens"],
        choice["logprobs"]["top_logprobs"],
        choice["logprobs"]["token_logprobs"],
        strict=True,
    ):
        assert len(top) in (logprobs, logprobs + 1)
        assert top[name] == own


def test_of_tokens_with_one_text_the_sampled_one_has_its_name(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["llama"], 400)
    [plain], [byte] = ([tokenizer._fast.token_to_id(text)] for text in ("A", "<0x41>"))
    own = TokenLogprob(byte, -2.0, ((plain, -1.0), (byte, -2.0)))
    namer = TokenNamer(tokenizer, by_id=False)
    assert namer.name_top(own, namer.name(byte)) == {f"token_id:{plain}": -1.0, "A": -2.0}
    assert TokenNamer(tokenizer, by_id=True).name_top(own, f"token_id:{byte}") == {
        f"token_id:{plain}": -1.0,
        f"token_id:{byte}": -2.0,
    }


async def test_an_echoed_prompt_that_ends_inside_a_character_joins_with_the_text(
    http: httpx.AsyncClient, folders: dict[str, Path]
) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folders["llama"])
    tokens = theirs("the 你").input_ids
    bias = {str(tokens[-1]): 100.0}
    body: dict[str, Any] = {"model": "llama", "prompt": tokens[:-1], "max_tokens": 1, "temperature": 0, "echo": True}
    choice = await complete(http, **body, logit_bias=bias, logprobs=0)
    assert choice["text"] == "<s> the 你"
    assert choice["logprobs"]["text_offset"][-3:] == [8, 8, 8]
    text, _ = await stream(http, **body, logit_bias=bias)
    assert text == choice["text"]
