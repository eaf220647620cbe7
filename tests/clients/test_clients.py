"""The ordinary examples of clients that nobody here wrote: a question, a stream, a second turn, a tool, a structure.

Each second turn is also asked of the bundled model, so that its verifier reads the history with its calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import Run
from tests.clients.upstream import ARGUMENTS, CAPITAL, PERSON, Upstream

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


def test_openai_in_python(run: Run) -> None:
    found = run("openai_python.py")
    assert found["chat"] == CONVERSATION | EMPTY_RESULT | {"cut": "LengthFinishReasonError"}
    cut = ["incomplete", "max_output_tokens"]
    referenced = {"referenced": CONVERSATION["tool"]}
    assert found["responses"] == CONVERSATION | EMPTY_RESULT | referenced | {"cut": cut}


def test_openai_in_node(run: Run) -> None:
    found = run("openai_node.mjs")
    assert found["chat"] == CONVERSATION | {"cut": "LengthFinishReasonError"}
    assert found["responses"] == CONVERSATION | {"cut": "incomplete"}
    assert found["errors"] == [[404, False]] * 4


def test_the_ai_sdk(run: Run) -> None:
    expected: dict[str, Any] = CONVERSATION | {"cut": "length"}
    assert run("ai_sdk.mjs") == {"responses": expected, "chat": expected, "compatible": expected}


def test_litellm(run: Run) -> None:
    assert run("litellm_client.py") == CONVERSATION | {"cut": "length", "too_long": "ContextWindowExceededError"}


def test_langchain(run: Run) -> None:
    expected = CONVERSATION | {"parsed_by_function": PERSON, "too_long": True}
    assert run("langchain_client.py") == {"chat": expected, "responses": expected}


def test_pydantic_ai(run: Run) -> None:
    expected = CONVERSATION | {"parsed_by_function": PERSON}
    assert run("pydantic_ai_client.py") == {"chat": expected, "responses": expected}


def test_instructor(run: Run) -> None:
    expected = {"plain": PERSON, "stream": PERSON, "second": PERSON, "cut": "IncompleteOutputException", "real": True}
    assert run("instructor_client.py") == {"tools": expected, "json": expected}
