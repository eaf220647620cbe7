"""The completions route with OpenAI's own client and with calls of evaluation harnesses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.request_checks import PromptTooLong
from engine.protocol.types import Branch, Completion, InvalidRequest, TokenizeRequest, TokenLogprob
from engine.protocol.wire import error_from_json, error_to_json
from tests.engine.conftest import Checkpoints
from tests.engine.exact import gap
from tests.engine.helpers import generate
from tests.seeds import shift

PROMPT = [random.Random(shift(0)).randrange(3, 360) for _ in range(20)]
OPTIONS = EngineOptions(kv_tokens=4096, max_running=16, max_waiting=256, step_tokens=512)
EXTRA = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints) -> Iterator[LocalEngine]:
    local = LocalEngine({"m": checkpoints("qwen3")}, OPTIONS)
    yield local
    asyncio.run(local.close())


@pytest.fixture(scope="module")
def bound(checkpoints: Checkpoints) -> float:
    """Return the tolerance between log-probabilities computed in different steps."""
    return gap(checkpoints("qwen3"))


@pytest.fixture
async def openai(address: str) -> AsyncIterator[AsyncOpenAI]:
    transport = httpx.AsyncHTTPTransport(uds=address.removeprefix("unix://"))
    async with httpx.AsyncClient(transport=transport, timeout=60) as http:
        yield AsyncOpenAI(base_url="http://engine/v1", api_key="none", http_client=http, max_retries=0)


async def read(engine: LocalEngine, prompt: list[int], count: int) -> list[TokenLogprob | None]:
    """Return a prompt's log-probabilities computed by the in-process engine."""
    request = generate(prompt, [Branch(0, 0, 0)], prompt_logprobs=count)
    [answer] = [event async for event in engine.generate(request)]
    assert isinstance(answer, Completion)
    return list(answer.prompt_logprobs or ())


def extra(choice: Any, name: str) -> Any:
    return choice.model_extra[name]


async def test_models_are_listed(openai: AsyncOpenAI) -> None:
    assert [(model.id, model.owned_by) async for model in openai.models.list()] == [("m", "reasoner")]


async def test_log_probabilities_have_openais_shape(openai: AsyncOpenAI, engine: LocalEngine, bound: float) -> None:
    answer = await openai.completions.create(
        model="m", prompt=PROMPT, max_tokens=12, logprobs=3, seed=5, temperature=0.7, user="somebody", extra_body=EXTRA
    )
    [choice] = answer.choices
    assert choice.logprobs is not None
    tokens, ids = choice.logprobs.tokens or [], extra(choice, "token_ids")
    pieces = [engine.tokenizer("m").piece(token) for token in ids]
    assert tokens == pieces
    offsets = choice.logprobs.text_offset or []
    assert offsets == sorted(offsets)
    hidden = engine.tokenizer("m").hidden  # special tokens have a name and no text
    for piece, offset in zip(pieces, offsets, strict=True):
        assert piece in hidden or piece.startswith("token_id:") or choice.text.startswith(piece, offset)
    after = await read(engine, PROMPT + ids, 3)
    expected = [one for one in after[len(PROMPT) :] if one is not None]
    assert choice.logprobs.token_logprobs == pytest.approx([one.logprob for one in expected], abs=bound)
    for top, one, piece in zip(choice.logprobs.top_logprobs or [], expected, pieces, strict=True):
        assert top[piece] == pytest.approx(one.logprob, abs=bound)
        assert max(top.values()) == pytest.approx(one.top[0][1], abs=bound)
        assert len(top) <= 4
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 12)


async def test_echo_without_new_tokens_returns_prompt_log_probabilities(
    openai: AsyncOpenAI, engine: LocalEngine, bound: float
) -> None:
    """The call with which evaluation harnesses score a text."""
    text = "so the answer is 42"
    ids = list(await engine.tokenize(TokenizeRequest("m", text)))
    answer = await openai.completions.create(model="m", prompt=[ids, PROMPT], max_tokens=0, echo=True, logprobs=1)
    assert [one.text for one in answer.choices] == [text, engine.tokenizer("m").decode_all(PROMPT)]
    for choice, prompt in zip(answer.choices, (ids, PROMPT), strict=True):
        expected = await read(engine, prompt, 1)
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[0] is None
        values = [one.logprob for one in expected if one is not None]
        assert logprobs.token_logprobs[1:] == pytest.approx(values, abs=bound)
        assert len(logprobs.tokens or ()) == len(logprobs.top_logprobs or ()) == len(prompt)
    silent = await openai.completions.create(model="m", prompt=text, max_tokens=0, echo=True)
    assert (silent.choices[0].text, silent.choices[0].logprobs) == (text, None)


async def test_echo_precedes_the_generated_text(openai: AsyncOpenAI) -> None:
    body: dict[str, Any] = {"model": "m", "prompt": "add 3", "max_tokens": 6, "seed": 1, "n": 2, "extra_body": EXTRA}
    plain = await openai.completions.create(**body, logprobs=0)
    echoed = await openai.completions.create(**body, logprobs=0, echo=True)
    for one, other in zip(plain.choices, echoed.choices, strict=True):
        assert other.text == "add 3" + one.text
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert (other.logprobs.tokens or [])[-6:] == one.logprobs.tokens
        assert len(other.logprobs.tokens or []) == len(extra(other, "prompt_token_ids")) + 6
    streamed = ["", ""]
    async for chunk in await openai.completions.create(**body, echo=True, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in echoed.choices]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_list_of_prompts_gives_the_results_of_single_prompts(openai: AsyncOpenAI, stream: bool) -> None:
    prompts = [PROMPT, PROMPT[:3], [7, 8, 9, 10]]
    greedy: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 7, "extra_body": EXTRA}
    alone = [(await openai.completions.create(prompt=prompt, **greedy)).choices[0] for prompt in prompts]
    if not stream:
        answer = await openai.completions.create(prompt=prompts, n=2, **greedy)
        assert [choice.index for choice in answer.choices] == list(range(6))
        texts = [choice.text for choice in answer.choices]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (27, 42)
    else:
        texts = [""] * 6
        async for chunk in await openai.completions.create(prompt=prompts, n=2, stream=True, **greedy):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [one.text for one in alone for _ in range(2)]


async def test_texts_and_token_lists_are_equivalent_prompts(openai: AsyncOpenAI, engine: LocalEngine) -> None:
    texts = ["add 3", "so the"]
    ids = [list(await engine.tokenize(TokenizeRequest("m", text))) for text in texts]
    answers = [
        await openai.completions.create(model="m", prompt=prompt, seed=3, max_tokens=9, n=2) for prompt in (texts, ids)
    ]
    assert [choice.text for choice in answers[0].choices] == [choice.text for choice in answers[1].choices]
    assert len({choice.text for choice in answers[0].choices}) == 4


async def test_streamed_log_probabilities_equal_the_whole_ones(openai: AsyncOpenAI) -> None:
    body: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 30, "seed": 2, "logprobs": 2}
    [whole] = (await openai.completions.create(**body, extra_body=EXTRA)).choices
    tokens, offsets, values = [], [], []
    async for chunk in await openai.completions.create(**body, extra_body=EXTRA, stream=True):
        if logprobs := chunk.choices[0].logprobs:
            tokens += logprobs.tokens or []
            offsets += logprobs.text_offset or []
            values += logprobs.token_logprobs or []
    assert whole.logprobs is not None
    assert (tokens, offsets, values) == (
        whole.logprobs.tokens,
        whole.logprobs.text_offset,
        whole.logprobs.token_logprobs,
    )


async def test_prompt_log_probabilities_have_vllms_shape(
    openai: AsyncOpenAI, engine: LocalEngine, bound: float
) -> None:
    answer = await openai.completions.create(
        model="m", prompt=PROMPT, max_tokens=1, n=2, logprobs=0, extra_body={"prompt_logprobs": 2, **EXTRA}
    )
    expected = await read(engine, PROMPT, 2)
    for choice in answer.choices:
        found = extra(choice, "prompt_logprobs")
        assert found[0] is None
        for entry, one in zip(found[1:], expected[1:], strict=True):
            assert one is not None
            assert entry[str(one.token_id)]["logprob"] == pytest.approx(one.logprob, abs=bound)
            assert set(entry) == {str(token) for token, _ in one.top} | {str(one.token_id)}
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens or ()) == 1


async def test_penalties_bias_and_length_reach_the_engine(openai: AsyncOpenAI) -> None:
    law: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "seed": None}
    only = await openai.completions.create(**law, logit_bias={"77": 100}, extra_body=EXTRA)
    assert extra(only.choices[0], "token_ids") == [77] * 8
    often = await openai.completions.create(
        **law, logit_bias={"77": 50}, frequency_penalty=2, presence_penalty=2, extra_body=EXTRA
    )
    assert extra(often.choices[0], "token_ids")[0] == 77
    strong = {"repetition_penalty": 1000.0, "min_tokens": 8, "return_token_ids": True}
    never = await openai.completions.create(**law, extra_body=strong)
    new = extra(never.choices[0], "token_ids")
    assert len(set(new)) == 8
    assert not set(new) & set(PROMPT)


async def test_tokens_can_be_named_by_their_ids(openai: AsyncOpenAI) -> None:
    named = {"return_tokens_as_token_ids": True, **EXTRA}
    answer = await openai.completions.create(model="m", prompt=PROMPT, max_tokens=3, logprobs=1, extra_body=named)
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in extra(choice, "token_ids")]


async def test_refusals_become_the_clients_exceptions(openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match="not served"):
        await openai.completions.create(model="nobody", prompt="a")
    with pytest.raises(BadRequestError, match="not streamed"):
        await openai.completions.create(model="m", prompt="a", echo=True, logprobs=1, stream=True)
    with pytest.raises(BadRequestError, match="at least 1"):
        await openai.completions.create(model="m", prompt="a", max_tokens=0)
    with pytest.raises(BadRequestError, match="at most 255") as refusal:
        await openai.completions.create(model="m", prompt=[[5] * 3, [5] * 300])
    assert refusal.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError, match="tokens hold at most") as refusal:
        await openai.completions.create(model="m", prompt="a" * 1_000_000)
    assert refusal.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError, match="max_tokens is 300") as refusal:
        await openai.completions.create(model="m", prompt="a", max_tokens=300)
    assert refusal.value.code == "invalid_value"


def test_a_prompt_that_is_too_long_is_the_same_error_in_the_client_as_in_the_engine() -> None:
    status, body = error_to_json(PromptTooLong("too long", "prompt"))
    error = error_from_json(status, body)
    assert isinstance(error, PromptTooLong)
    assert (status, str(error), error.field) == (400, "too long", "prompt")
    assert type(error_from_json(*error_to_json(InvalidRequest("wrong", "prompt")))) is InvalidRequest


async def test_a_refused_list_of_prompts_leaves_nothing_running(openai: AsyncOpenAI, engine: LocalEngine) -> None:
    before = engine.stats()["m"].generated_tokens
    with pytest.raises(BadRequestError):
        await openai.completions.create(model="m", prompt=[[5] * 3, [4000]], max_tokens=200, extra_body=EXTRA)
    assert (await openai.completions.create(model="m", prompt="a", max_tokens=1)).choices
    assert engine.stats()["m"].running == 0
    assert engine.stats()["m"].generated_tokens < before + 100
