"""Tokens as JSON, those of earlier versions among them, and the refusal of texts where ids are needed."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.request_checks import check_generate, check_score
from engine.protocol.types import (
    Branch,
    EngineClient,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    ScoreItem,
    ScoreRequest,
    Tokens,
)
from engine.protocol.wire import read_tokens, write_tokens
from engine.remote.chat.encoding import decode_prompt, decode_text, encode_answer, encode_prompt, measure_thought
from engine.remote.http import HttpEngine

PROMPT = encode_prompt([{"role": "user", "content": "3 + 4?"}])
TEXTS = encode_answer("<think>\nÄ", "\U0001f642", 5, 3)
COUNTS = st.none() | st.integers(0, 60)


def pack(text: str, count: int, *, is_thought: bool) -> list[int]:
    """Return a text as versions before text tokens stored it: a mark and a piece of UTF-8 in each number."""
    data, mark = text.encode(), b"\x02" if is_thought else b"\x01"
    ends = [len(data) * index // count for index in range(count + 1)] if count else []
    return [int.from_bytes(mark + data[start:end], "big") for start, end in itertools.pairwise(ends)]


@given(st.text(), st.text(), COUNTS, COUNTS)
def test_the_tokens_of_an_answer_come_back_from_json(
    thought: str, answer: str, reported: int | None, reported_thought: int | None
) -> None:
    tokens = encode_answer(thought, answer, reported, reported_thought)
    assert read_tokens(json.loads(json.dumps(write_tokens(tokens))), PROMPT) == tokens


@given(st.lists(st.integers(0, 1 << 31)))
def test_ids_are_the_same_in_json(ids: list[int]) -> None:
    assert write_tokens(tuple(ids)) == ids
    assert read_tokens(ids, (1, 2)) == tuple(ids)


@given(st.text(), st.text(), st.integers(1, 30), st.integers(1, 30))
def test_texts_that_earlier_versions_packed_come_back(
    thought: str, answer: str, num_thought: int, num_answer: int
) -> None:
    packed = pack(thought, num_thought, is_thought=True) + pack(answer, num_answer, is_thought=False)
    tokens = read_tokens(packed, PROMPT)
    assert (decode_text(tokens), len(tokens)) == (thought + answer, num_thought + num_answer)
    assert measure_thought(tokens) == (len(thought), num_thought)
    assert decode_prompt(PROMPT + tokens).answer == answer


INFO = ModelInfo("m", "generate", 100, 50, 1)


@pytest.mark.parametrize(
    ("prompt", "generated", "field"), [(PROMPT, (), "prompt"), (TEXTS, (), "prompt"), ((1,), TEXTS, "generated")]
)
def test_an_engine_with_ids_refuses_texts_by_name(prompt: Tokens, generated: Tokens, field: str) -> None:
    request = GenerateRequest("r", "m", prompt, (Branch(1, 1, 9, generated),))
    with pytest.raises(InvalidRequest, match=f"{field} has texts of a server that only chats instead of token ids"):
        check_generate(request, INFO, 4)
    with pytest.raises(InvalidRequest, match="token_ids has texts of a server that only chats"):
        check_score(ScoreRequest("s", "m", (ScoreItem(((1,),), (0,)),), TEXTS), INFO, 4)


@pytest.mark.parametrize("dialect", ["reasoner", "vllm"])
async def test_a_client_of_a_server_with_ids_refuses_texts_without_a_request(dialect: str) -> None:
    engine: EngineClient = HttpEngine("http://127.0.0.1:9", dialect=dialect)
    with pytest.raises(InvalidRequest, match="prompt has texts of a server that only chats"):
        async for _ in engine.generate(GenerateRequest("r", "m", PROMPT, (Branch(1, 1, 9),))):
            pass
    with pytest.raises(InvalidRequest, match=r"items\.parts has texts of a server that only chats"):
        await engine.score(ScoreRequest("s", "m", (ScoreItem((TEXTS,), (0,)),), (1, 2)))
    await engine.release("job", TEXTS)
    await engine.close()
