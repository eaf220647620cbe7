"""The ordinary examples of clients that nobody here wrote: a question, a stream, a second turn, a tool, a structure.

Each second turn is also asked of the bundled model, so that its verifier reads the history with its calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import Await, Run
from tests.clients.upstream import ARGUMENTS, CAPITAL, PERSON, Upstream

RUNS = "chat, stream, second turn, tool, structured output, error, cancel"
CONVERSATION = {
    "plain": CAPITAL,
    "stream": CAPITAL,
    "second": f"Question 2; before I said: {CAPITAL}",
    "call": [ARGUMENTS],
    "tool": "It is sunny in Paris.",
    "parsed": PERSON,
    "real": True,
}
EMPTY_RESULT = {"empty_result": "It is unknown in Paris."}


@pytest.fixture(autouse=True)
def _no_narration(upstream: Upstream) -> Iterator[None]:
    """Check that no client's history shows the model our narration of an earlier search as its own words."""
    before = len(upstream.requests)
    yield
    messages = [message for body in upstream.requests[before:] for message in body["messages"]]
    assert not [message for message in messages if "Searching by" in str(message) or "<think>" in str(message)]


@pytest.mark.client(name="OpenAI (Python)", package="openai", runs=RUNS)
def test_openai_in_python(run: Run, await_cancelled: Await) -> None:
    found = run("openai_python.py")
    await_cancelled(2)
    error = {"error": "NotFoundError"}
    assert found["chat"] == CONVERSATION | EMPTY_RESULT | error | {"cut": "LengthFinishReasonError"}
    cut = ["incomplete", "max_output_tokens"]
    referenced = {"referenced": CONVERSATION["tool"]}
    assert found["responses"] == CONVERSATION | EMPTY_RESULT | referenced | error | {"cut": cut}


@pytest.mark.client(name="OpenAI (Node)", package="npm:openai", runs=RUNS)
def test_openai_in_node(run: Run, await_cancelled: Await) -> None:
    found = run("openai_node.mjs")
    await_cancelled(2)
    assert found["chat"] == CONVERSATION | {"cut": "LengthFinishReasonError"}
    assert found["responses"] == CONVERSATION | {"cut": "incomplete"}
    assert found["errors"] == [[404, False]] * 4


@pytest.mark.client(name="AI SDK", package="npm:ai", runs=RUNS)
def test_the_ai_sdk(run: Run, await_cancelled: Await) -> None:
    expected: dict[str, Any] = CONVERSATION | {"cut": "length", "error": "AI_APICallError", "aborted": True}
    assert run("ai_sdk.mjs") == {"responses": expected, "chat": expected, "compatible": expected}
    await_cancelled(3)


@pytest.mark.client(name="LiteLLM, as openai/", package="litellm", runs=RUNS)
def test_litellm(run: Run, await_cancelled: Await) -> None:
    errors = {"cut": "length", "error": "NotFoundError", "too_long": "ContextWindowExceededError"}
    assert run("litellm_client.py") == CONVERSATION | errors
    await_cancelled(1)


@pytest.mark.client(name="LiteLLM, as a provider", package="litellm", runs="chat, stream, second turn, error")
def test_litellm_with_a_provider_of_ours(run: Run) -> None:
    expected = {name: CONVERSATION[name] for name in ("plain", "stream", "second")}
    assert run("litellm_provider.py") == expected | {"error": True}


@pytest.mark.client(name="LiteLLM, as anthropic/", package="litellm", runs="chat, stream, second turn, error")
def test_litellm_by_its_anthropic_route(run: Run) -> None:
    expected = {name: CONVERSATION[name] for name in ("plain", "stream", "second")}
    assert run("litellm_anthropic.py") == expected | {"messages": CAPITAL, "error": "NotFoundError"}


@pytest.mark.client(name="Anthropic (Python)", package="anthropic", runs=RUNS)
def test_anthropic_in_python(run: Run, await_cancelled: Await) -> None:
    expected = {"parsed_by_class": PERSON, "cut": "max_tokens", "error": "NotFoundError"}
    assert run("anthropic_client.py") == CONVERSATION | expected
    await_cancelled(1)


@pytest.mark.client(name="LangChain", package="langchain-openai", runs=RUNS)
def test_langchain(run: Run, await_cancelled: Await) -> None:
    expected = CONVERSATION | {"parsed_by_function": PERSON, "error": True, "too_long": True}
    assert run("langchain_client.py") == {"chat": expected, "responses": expected}
    await_cancelled(2)


@pytest.mark.client(name="Pydantic AI", package="pydantic-ai-slim", runs=RUNS)
def test_pydantic_ai(run: Run, await_cancelled: Await) -> None:
    expected = CONVERSATION | {"parsed_by_function": PERSON, "error": "ModelNotFoundError"}
    assert run("pydantic_ai_client.py") == {"chat": expected, "responses": expected}
    await_cancelled(2)


@pytest.mark.client(name="Pydantic AI, in batches", package="pydantic-ai-slim", runs="chat, tool, error")
def test_the_batches_of_pydantic_ai(run: Run) -> None:
    expected = {"plain": CAPITAL, "error": ["ModelRequestRejectedError", True], "runs": [CAPITAL, CONVERSATION["tool"]]}
    assert run("pydantic_ai_batch.py") == {"responses": expected, "messages": expected}


@pytest.mark.client(name="instructor", package="instructor", runs="chat, stream, second turn, structured output, error")
def test_instructor(run: Run) -> None:
    expected = {"plain": PERSON, "stream": PERSON, "second": PERSON, "cut": "IncompleteOutputException", "real": True}
    expected |= {"error": "InstructorRetryException"}
    assert run("instructor_client.py") == {"tools": expected, "json": expected}
