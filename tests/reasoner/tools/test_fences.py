"""Fenced blocks: calls at the end of a text, the cells of a branch, and blocks of output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasoner.tools.fences import find_call, find_cells, format_output, is_in_block

BLOCK = "```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (BLOCK, "print(1)"),
        (f"First:\n{BLOCK}\n\n ", "print(1)"),
        ("```py\nx = 1\n\ny = 2\n```", "x = 1\n\ny = 2"),
        ("```Python3 \nx\n``` \n", "x"),
        ("```python\n```", ""),
        (f"{BLOCK}\n```output\n1\n```\n\n```python\nprint(2)\n```", "print(2)"),
        ("```python\nprint('''\n```json\n''')\n```", "print('''\n```json\n''')"),
        (f"{BLOCK}\nso it is 1", None),
        (f"{BLOCK}\n```output\n1\n```\n", None),
        ("```python\nprint(1)", None),
        ("```json\n{}\n```", None),
        ("```\nprint(1)\n```", None),
        ("a ```python print(1)```", None),
        ("```python print(1)```", None),
        ("Text\n```", None),
        ("", None),
    ],
)
def test_a_call_is_a_closed_python_block_at_the_end(text: str, code: str | None) -> None:
    assert find_call(text) == code


def test_cells_are_the_python_blocks_that_ran_and_the_last_one() -> None:
    text = f"{BLOCK}\n```output\n```py\n```\n```json\n1\n```\n```python\nx\n```\nWait.\n```python\nopen"
    assert find_cells(text) == ["print(1)"]
    assert find_cells(f"{text}\n```") == ["print(1)", "open"]
    assert find_cells(f"{text}\n```\n\n```output\n```") == ["print(1)", "open"]
    assert find_cells(f"{text}\n```\nSo:\n```output\n```") == ["print(1)"]
    assert is_in_block(text)
    assert not is_in_block(BLOCK)


@given(output=st.text(st.sampled_from("ab`\n <py")), before=st.sampled_from([BLOCK, f"{BLOCK}\n"]))
def test_no_output_ends_its_block_or_becomes_a_cell(output: str, before: str) -> None:
    text = before + format_output(before, output)
    assert find_cells(text) == ["print(1)"]
    assert not is_in_block(text)
    assert text.endswith("\n```\n")
    assert find_call(text) is None
    assert find_call(f"{text}{BLOCK}") == "print(1)"
