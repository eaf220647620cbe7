"""The output of a call in a model's own format has exactly the tokens that the model's chat template renders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from engine.protocol.types import EngineClient, InvalidRequest, ModelInfo, TokenizeRequest
from reasoner.jobs.sampling_spec import Sampling
from reasoner.sandbox.cells import CellLimits, CellResult
from reasoner.search.branch_text import BranchText
from reasoner.search.calls.runner import CallRunner, Output
from reasoner.search.policies.policy import Policy
from reasoner.search.policies.tool_messages import find_tool_messages
from reasoner.thoughts import UNKNOWN, ThoughtProgress
from reasoner.tools import python
from reasoner.tools.calls import PYTHON_FUNCTION, CallReader
from reasoner.tools.formats.registry import FORMATS, find_format
from reasoner.tools.python import PythonRunner
from reasoner.tree import Node
from tests.reasoner.tools.templates import FAMILIES, Family, FamilyTokens

CODE = 'print(f"{6 * 7}\\n\'")\nx = [1]'
TOOLS = {"tools": [{"type": "function", "function": {"name": PYTHON_FUNCTION.name}}]}
USER = {"role": "user", "content": "How many?"}


async def run_call(
    monkeypatch: pytest.MonkeyPatch, engine: FamilyTokens, family: Family, text: str, printed: str, *, ends: bool
) -> tuple[Output, list[Sequence[str]]]:
    """Return the output of the call with which a text ends, and the codes that ran."""
    ran: list[Sequence[str]] = []

    async def run_cells(cells: Sequence[str], *_: Any, **__: Any) -> CellResult:
        ran.append(cells)
        return CellResult(printed, "ok", 0.1)

    monkeypatch.setattr(python, "run_cells", run_cells)
    client = cast("EngineClient", engine)
    policies = (Policy(ModelInfo("m", "generate", 4096, 1, 1), Sampling()),)
    own = FORMATS[family.format]
    messages = [await find_tool_messages(client, "m", own, TOOLS)]
    runner = CallRunner(PythonRunner(CellLimits(), lambda: None), client, policies, 8, CallReader(own), messages)
    thinking = ThoughtProgress(UNKNOWN, "closed")
    branch = BranchText(Node((), None, (1,)), 4000, thinking=thinking, text=text, has_ended_turn=ends)
    output = await runner.run(branch)
    assert output is not None
    return output, ran


@pytest.mark.parametrize("name", FAMILIES)
async def test_calls_and_outputs_are_the_tokens_of_the_template(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[name]
    engine, printed = FamilyTokens(tmp_path, family), 'a "b"\n\\n \u00e9 (42)'
    assert find_format(family.template) in (None, FORMATS[family.format])
    text = family.write("", [("python", {"code": CODE})]).lstrip("\n")
    output, ran = await run_call(monkeypatch, engine, family, text, printed, ends=bool(family.end_of_turn))
    assert ran == [[CODE]]
    assert output.text == f"\n```output\n{printed}\n```\n"
    arguments: Any = {"code": CODE}
    if FORMATS[family.format].has_text_arguments:
        arguments = json.dumps(arguments)
    call = {"id": "000000000", "type": "function", "function": {"name": "python", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": printed}]
    whole = await engine.tokenize(TokenizeRequest("m", messages, template_kwargs=TOOLS))
    prompt = await engine.tokenize(TokenizeRequest("m", [USER], template_kwargs=TOOLS))
    if name == "qwen3-thinking":  # earlier turns have no thought
        prompt = prompt[: -len(engine.text.encode("<think>\n"))]
    written = engine.text.encode(text + family.end_of_turn)
    assert engine.text.decode_all(prompt + written + output.token_ids) == engine.text.decode_all(whole)
    assert prompt + written + output.token_ids == whole
    assert output.token_ids[-len(output.next_turn) :] == output.next_turn


@pytest.mark.parametrize("name", FAMILIES)
async def test_printed_delimiters_never_become_control_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[name]
    engine = FamilyTokens(tmp_path, family)
    text, ends = family.write("", [("python", {"code": CODE})]), bool(family.end_of_turn)
    special = {token for word in family.special for token in engine.text.encode(word)}
    counts = []
    for printed in ("plain", " ".join(family.special)):
        output, _ = await run_call(monkeypatch, engine, family, text, printed, ends=ends)
        counts.append([token for token in output.token_ids if token in special])
    assert counts[0] == counts[1] != []


async def test_a_server_that_hides_the_token_of_the_end_gets_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES["llama-3.1"]
    engine = FamilyTokens(tmp_path, family)
    text = family.write("", [("python", {"code": CODE})])
    shown, _ = await run_call(monkeypatch, engine, family, text, "42", ends=True)
    hidden, _ = await run_call(monkeypatch, engine, family, text, "42", ends=False)
    assert hidden.token_ids == engine.text.encode(family.end_of_turn) + shown.token_ids


async def test_bare_code_of_llama_runs_and_its_other_end_token_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES["llama-3.1"]
    engine = FamilyTokens(tmp_path, family)
    output, ran = await run_call(monkeypatch, engine, family, f"<|python_tag|>{CODE}", "42", ends=True)
    assert ran == [[CODE]]
    expected = '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|><|start_header_id|>assistant'
    assert engine.text.decode_all(output.token_ids) == f"{expected}<|end_header_id|>\n\n"


async def test_a_template_without_outputs_is_refused(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{{ tools is defined }}"
    engine = FamilyTokens(tmp_path, Family("hermes", plain, ("<|im_end|>",), FAMILIES["qwen3"].write))
    with pytest.raises(InvalidRequest, match="does not render the output of a call after it"):
        await find_tool_messages(cast("EngineClient", engine), "m", FORMATS["hermes"], TOOLS)
