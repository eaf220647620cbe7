"""Functions on their way to servers, and calls on their way back: vLLM, servers that only chat, and our own text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.protocol.types import Branch, GenerateRequest, TokenizeRequest
from engine.remote.chat.options import ChatOptions
from engine.text.tokenizer import Tokenizer
from reasoner.tools.formats.call import FunctionTool, ToolCall
from reasoner.tools.formats.hermes import Hermes
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import generate
from tests.engine.remote.test_chat import Hosted, said, stream, usage
from tests.engine.remote.test_constraints import collect
from tests.engine.remote.test_openai_compatible import chunks, piece, scripted

FUNCTION = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
TOOLS = {"tools": [FUNCTION]}
QUESTION = [{"role": "user", "content": "?"}]
KNOWN = [FunctionTool("f"), FunctionTool("g")]


def call(index: int, name: str | None, arguments: str) -> dict[str, Any]:
    function = {"arguments": arguments} | ({} if name is None else {"name": name})
    return {"index": index, "function": function} | ({} if name is None else {"id": f"c{index}", "type": "function"})


@pytest.mark.parametrize("words", ["", "Let me see."])
async def test_a_chat_server_gets_functions_and_its_calls_become_text(words: str) -> None:
    answer = stream(
        said(words, tool_calls=[call(0, "f", "")]),
        said("", tool_calls=[call(0, None, '{"a": ')]),
        said("", tool_calls=[call(0, None, '"x}"}'), call(1, "g", "{}")]),
        said("", "tool_calls"),
        usage(9, 12),
    )
    hosted = Hosted(lambda _: answer)
    prompt = await hosted.engine.tokenize(TokenizeRequest("m", QUESTION, template_kwargs=TOOLS))
    [one] = await collect(hosted.engine, GenerateRequest("r", "m", prompt, (Branch(1, 1, 50),)))
    assert hosted.bodies[0]["tools"] == [FUNCTION]
    assert "tool_choice" not in hosted.bodies[0]
    parsed = Hermes().parse(one.text, KNOWN)
    assert parsed.text_before == words
    assert parsed.calls == (ToolCall("f", '{"a": "x}"}'), ToolCall("g", "{}"))
    assert (one.finish_reason, len(one.token_ids)) == ("stop", 12)
    [info] = await hosted.engine.models()
    assert info.tells_calls
    await hosted.engine.close()


async def test_a_chat_server_gets_the_demanded_choice() -> None:
    hosted = Hosted(lambda _: stream(said("", tool_calls=[call(0, "f", "{}")]), said("", "tool_calls"), usage(9, 3)))
    prompt = await hosted.engine.tokenize(
        TokenizeRequest("m", QUESTION, template_kwargs=TOOLS | {"tool_choice": "required"})
    )
    await collect(hosted.engine, GenerateRequest("r", "m", prompt, (Branch(1, 1, 50),)))
    assert (hosted.bodies[0]["tools"], hosted.bodies[0]["tool_choice"]) == ([FUNCTION], "required")
    await hosted.engine.close()


async def test_a_server_that_continues_texts_leaves_calls_in_its_models_own_format() -> None:
    options = ChatOptions(("m",), prefill="continue_final_message")
    hosted = Hosted(lambda _: stream(said("<tool_call>", "stop"), usage(9, 3)), options)
    prompt = await hosted.engine.tokenize(
        TokenizeRequest("m", QUESTION, template_kwargs=TOOLS | {"enable_thinking": False})
    )
    await collect(hosted.engine, GenerateRequest("r", "m", prompt, (Branch(1, 1, 50),)))
    [body] = hosted.bodies
    assert (body["tools"], body["tool_choice"]) == ([FUNCTION], "none")
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    [info] = await hosted.engine.models()
    assert not info.tells_calls
    await hosted.engine.close()


async def test_vllm_renders_functions_and_shows_special_tokens_on_request() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [1, 2]})
        return chunks(piece("[TOOL_CALLS]f[ARGS]{}", [5, 6], -1.0), piece("</s>", [2], -1.0, finish_reason="stop"))

    client = scripted("vllm", answer)
    await client.tokenize(TokenizeRequest("m", QUESTION, template_kwargs=TOOLS | {"enable_thinking": False}))
    assert bodies[0]["tools"] == [FUNCTION]
    assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    request = generate((1, 2), [Branch(1, 1, 9)])
    [one] = await collect(client, replace(request, skip_special_tokens=False))
    assert bodies[1]["skip_special_tokens"] is False
    assert one.text == "[TOOL_CALLS]f[ARGS]{}"  # without the end of the turn
    await collect(client, request)
    assert "skip_special_tokens" not in bodies[2]
    await client.close()


def test_our_engine_shows_the_delimiters_of_calls_and_no_other_special_token(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = checkpoints("qwen3")
    for file in folder.iterdir():
        if file.is_file() and "tokenizer" in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    ids = [*document["model"]["vocab"].values(), *(token["id"] for token in document["added_tokens"])]
    size = 1 + max(ids)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    names = ("[TOOL_CALLS]", "[ARGS]", "<|hidden|>")
    document["added_tokens"] += [{"id": size + place, "content": name} | flags for place, name in enumerate(names)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = Tokenizer(tmp_path, size + 3)
    text = "[TOOL_CALLS]f[ARGS]{}"
    tokens = tokenizer.encode(f"<|hidden|>{text}<|hidden|>")
    assert {size, size + 1, size + 2} <= set(tokens)
    assert tokenizer.decode(tokens) == text
