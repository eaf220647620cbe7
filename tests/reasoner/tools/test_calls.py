"""Calls of Python with which texts end, in every format and as blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasoner.tools.calls import CallReader, PythonCall
from reasoner.tools.formats.registry import FORMATS
from tests.reasoner.tools.formats.rendering import RENDERERS, named_tools

CODES = st.text("ab1 =+\n\t'\"\\{}()[]#é`", min_size=1, max_size=30).filter(lambda code: code.strip("\n") == code)
WORDS = st.sampled_from(["", "Let me see."])


@pytest.mark.parametrize("name", RENDERERS)
@given(code=CODES, words=WORDS)
def test_the_code_of_a_call_is_found_in_every_format(name: str, code: str, words: str) -> None:
    tool_format, write = RENDERERS[name]
    text = write(words, [("python", {"code": code})])
    assert CallReader(FORMATS[tool_format]).find(text, ends_turn=True) == PythonCall(code, is_own=True)
    assert CallReader(FORMATS[tool_format]).find(write(words, []), ends_turn=True) is None
    assert CallReader().find(text, ends_turn=True) is None


@pytest.mark.parametrize("name", RENDERERS)
def test_a_text_is_in_a_call_from_its_beginning_to_its_end(name: str) -> None:
    tool_format, write = RENDERERS[name]
    own = FORMATS[tool_format]
    reader, text = CallReader(own), write("One.\n\nTwo.", [("python", {"code": "x = 1\n\ny = 2"})])
    begin = min(match.end() for match in own.start.finditer(text))
    end = len(text) if own.call_end is None else text.rindex(own.call_end) + len(own.call_end)
    for cut in range(len(text) + 1):
        is_inside = begin <= cut < end or (own.call_end is None and cut >= begin)
        assert reader.is_in_call(text[:cut]) == is_inside, text[:cut]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("harmony", "<|channel|>analysis to=python code<|message|>print(1)<|call|>"),
        ("harmony", " to=python<|channel|>commentary code<|message|>print(1)"),
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=python<|message|>print(1)<|call|>"),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", "I run it.<|python_tag|>print(1)"),
    ],
)
def test_bare_code_is_a_call_of_the_built_in_tool(tool_format: str, text: str) -> None:
    assert CallReader(FORMATS[tool_format]).find(text, ends_turn=True) == PythonCall("print(1)", is_own=True)


def test_a_block_is_a_call_with_and_without_a_format() -> None:
    block = "```python\nprint(1)\n```"
    for reader in (CallReader(), CallReader(FORMATS["hermes"])):
        assert reader.find(block, ends_turn=False) == PythonCall("print(1)")
        assert reader.find(f"{block}\nSo", ends_turn=True) is None


def test_only_a_delimiter_or_the_end_of_the_turn_completes_a_call() -> None:
    call = RENDERERS["hermes"][1]("", [("python", {"code": "1"})])
    reader = CallReader(FORMATS["hermes"])
    assert reader.find(call, ends_turn=False) is not None
    assert reader.find(call.removesuffix("</tool_call>"), ends_turn=False) is None
    cut = reader.find(call.removesuffix("</tool_call>"), ends_turn=True)
    assert cut is not None
    assert "'</tool_call>' was expected" in cut.fault
    assert CallReader(FORMATS["llama3_json"]).stops == CallReader().stops


def test_calls_of_the_clients_functions_alone_are_none_of_python() -> None:
    reader = CallReader(FORMATS["hermes"], named_tools("clock"))
    write = RENDERERS["hermes"][1]
    assert reader.find(write("", [("clock", {})]), ends_turn=True) is None
    both = reader.find(write("", [("clock", {}), ("python", {"code": "1"})]), ends_turn=True)
    assert both == PythonCall(None, "one message calls 'python' once, and nothing else", is_own=True)
