"""Published candidates: each form as its tool writes it, and what is refused, by line and field."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from reasoner.evaluation.logs.registry import read_questions
from reasoner.evaluation.suites.suite import SuiteError

TEXTS = ["6 * 7 = \\boxed{42}", "It is \\boxed{41}"]
FOLDER = Path(__file__).parent


def sample(document: int, *, texts: list[str] = TEXTS, filtered: str = "strict-match", **fields: Any) -> dict[str, Any]:
    """Return a line as lm-evaluation-harness 0.4.13 writes it for a task that generates."""
    return {
        "doc_id": document,
        "doc": {"question": f"What is {document} times 7?", "answer": f"{document * 7}"},
        "target": f"so it is\n#### {document * 7}",
        "arguments": {"gen_args_0": {"arg_0": "Q: …\nA:", "arg_1": {"until": ["\n\n"], "do_sample": True}}},
        "resps": [texts],
        "filtered_resps": ["42"],
        "filter": filtered,
        "metrics": ["exact_match"],
        "doc_hash": "0", "prompt_hash": "1", "target_hash": "2",
        "exact_match": 1.0,
        **fields,
    }  # fmt: skip


def solved(problem: str, **fields: Any) -> dict[str, Any]:
    """Return a line as search-and-learn saves it for a problem of MATH-500."""
    return {
        "problem": problem, "solution": "…", "answer": "42", "subject": "Algebra", "level": 1, "unique_id": problem,
        "completions": TEXTS, "scores": [[0.5, 0.9], [0.4]], "pred": TEXTS[0], "completion_tokens": [9, 7],
        "agg_scores": [0.9, 0.4], "pred_maj@1": "\\boxed{42}",
        **fields,
    }  # fmt: skip


def epoch(name: str | int, number: int, text: Any = TEXTS[0], **fields: Any) -> dict[str, Any]:
    """Return a sample of a log of Inspect 0.3.285."""
    message = {"id": "a", "content": text, "source": "generate", "role": "assistant", "model": "mockllm/model"}
    return {
        "id": name, "epoch": number, "input": "What is 6 times 7?", "target": "42", "messages": [],
        "output": {"model": "mockllm/model", "choices": [{"message": message, "stop_reason": "stop"}]},
        "attachments": {},
        **fields,
    }  # fmt: skip


def log(*samples: Any, epochs: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "version": 2, "status": "success", "eval": {"model": "m", "config": {"epochs": epochs}}, "plan": {},
        "samples": list(samples),
        **fields,
    }  # fmt: skip


def write(path: Path, content: Any) -> Path:
    """Write lines of JSON, a document, or an archive as the suffix says."""
    if path.suffix == ".json":
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    elif path.suffix == ".eval":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in content.items():
                archive.writestr(name, text if isinstance(text, str) else json.dumps(text))
    else:
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in content))
    return path


def pack(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of an archive with the same log."""
    samples = {f"samples/{item['id']}_epoch_{item['epoch']}.json": item for item in document["samples"]}
    return {"_journal/start.json": {}, "header.json": {k: v for k, v in document.items() if k != "samples"}, **samples}


# What is read.


@pytest.mark.parametrize("arguments", ["dict", "list"])
def test_documents_of_the_harness_are_read_once_for_all_filters(tmp_path: Path, arguments: str) -> None:
    lines = [sample(document, filtered=name) for name in ("strict-match", "flexible-extract") for document in (0, 6)]
    for line in lines:
        if arguments == "list":  # as versions until 0.4.2 write them, without a filter's name
            line["arguments"] = [["Q: …\nA:", {"until": []}]]
    questions = read_questions(write(tmp_path / "samples_gsm8k.jsonl", lines))
    assert [(question.id, question.question, question.gold) for question in questions] == [
        ("samples_gsm8k-0", "What is 0 times 7?", "0"), ("samples_gsm8k-6", "What is 6 times 7?", "42"),
    ]  # fmt: skip
    assert questions[0].candidates == TEXTS
    assert len(read_questions(tmp_path / "samples_gsm8k.jsonl", 1)) == 1


def test_a_document_without_a_question_is_asked_by_its_prompt(tmp_path: Path) -> None:
    [question] = read_questions(write(tmp_path / "s.jsonl", [sample(6, doc={"text": "…"})]))
    assert question.question == "Q: …\nA:"


def test_completions_of_search_and_learn_are_read(tmp_path: Path) -> None:
    questions = read_questions(write(tmp_path / "best_of_n_completions.jsonl", [solved("a"), solved("b")]))
    assert [(question.question, question.candidates, question.gold) for question in questions] == [
        ("a", TEXTS, "42"), ("b", TEXTS, "42"),
    ]  # fmt: skip


def test_both_forms_of_a_log_of_inspect_give_the_same_questions(tmp_path: Path) -> None:
    reasoned = [{"type": "reasoning", "reasoning": "six sevens"}, {"type": "text", "text": "\\boxed{42}"}]
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 6 times 7?"}]
    document = log(
        epoch("a", 1), epoch("a", 2, TEXTS[1]), epoch(7, 1, reasoned, input=messages, target=["42"]),
        epoch(7, 2, "attachment://abc", attachments={"abc": "long \\boxed{42}"}), epochs=2,
    )  # fmt: skip
    read = [
        read_questions(write(tmp_path / "log.json", document)),
        read_questions(write(tmp_path / "log.eval", pack(document))),
    ]
    for questions in read:
        by_id = {question.id: question for question in questions}
        assert by_id["log-a"].candidates == TEXTS
        assert by_id["log-7"].candidates == ["<think>\nsix sevens\n</think>\n\n\\boxed{42}", "long \\boxed{42}"]
        assert {(question.question, question.gold) for question in questions} == {("What is 6 times 7?", "42")}


def test_an_archive_that_inspect_wrote_is_read() -> None:
    """The file is of inspect_ai 0.3.285 with its mock model, without what is not read; its members are in Zstandard."""
    pytest.importorskip("zstandard")
    questions = {question.id: question for question in read_questions(FOLDER / "inspect.eval")}
    assert questions["inspect-add"].candidates == ["The sum is \\boxed{4}"] * 3
    long = "x " * 200 + "so \\boxed{4}"
    assert questions["inspect-7"].candidates == ["I think \\boxed{5}", long, "I think \\boxed{5}"]
    assert questions["inspect-7"].gold == "4"


def test_an_archive_in_zstandard_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.version_info >= (3, 14):
        pytest.skip("zipfile reads it")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        SuiteError, match=r"inspect\.eval: compressed by Zstandard: pip install zstandard, or 'inspect log"
    ):
        read_questions(FOLDER / "inspect.eval")


# What is refused.


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([sample(0), "{"], "line 2: not JSON"),
        ([sample(0), sample(0)], "line 2, field 'doc_id': '0' is there twice for the filter 's.*, also at .*line 1"),
        ([sample(0), sample(1), sample(0, filtered="b")], "s: filter 'b' lacks 1 documents, such as doc_id '1'"),
        ([sample(0), sample(0, filtered="b", texts=["x", "y"])], "line 2, field 'resps': document '0' has other"),
        ([sample(0), sample(1, texts=["x"])], "line 2, field 'doc_id': '1' has 1 candidates, but .*line 1 has 2"),
        ([sample(0, resps=[["-1.5", "False"], ["-2", "True"]])], "field 'resps': it must be one list of texts"),
        ([sample(0, arguments={"gen_args_0": {"arg_0": "Q", "arg_1": " yes"}})], "'arguments': a request of log-"),
        ([sample(0, arguments=3)], "field 'arguments': it must have 'gen_args_0'"),
        ([sample(0, target=[1])], r"field 'target': \[1\] must be the right answer"),
        ([sample(0, doc_id=None)], "field 'doc_id': None must be the number"),
        ([{key: value for key, value in sample(0).items() if key != "target"}], "line 1: field 'target' is missing"),
        ([{"doc_id": 0, "prompt_0": "Q", "logit_0": "A", "truth": "4"}], "line 1: written by lm-evaluation-harness b"),
        ([solved("a"), solved("a")], "line 2, field 'problem': 'a' is there twice, also at .*line 1"),
        ([solved("a", completions=[])], "field 'completions': List should have at least 1 item"),
        ([solved("a"), solved("b", completions=["x"], scores=[[1]])], "line 2, field 'problem': 'b' has 1 candidates"),
        ([solved("a", scores=[[1]])], "field 'scores': it must be a list for each of the 2 completions"),
        ([{key: value for key, value in solved("a").items() if key != "answer"}], "line 1: field 'answer' is missing"),
    ],
)  # fmt: skip
def test_faulty_lines_are_refused_by_line_and_field(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(SuiteError, match=message):
        read_questions(write(tmp_path / "s.jsonl", lines))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "line 1: not JSON"),
        ({"version": 2, "samples": []}, "line 1: it needs a text 'question'"),
        (log(version=3), "field 'version': 3 is not known; known is 2"),
        (log(status="cancelled"), "field 'status': 'cancelled': samples may be missing"),
        (log(), "holds no question"),
        (log(samples=None), "field 'samples': it must be a list"),
        (log(epoch("a", 1), epoch("a", 1)), r"samples\[1\], field 'epoch': epoch 1 of sample 'a' is there twice"),
        (log(epoch("a", 1), epochs=2), r"samples\[0\], field 'epoch': sample 'a' lacks epoch 2 of 2"),
        (log(epoch("a", 1, error={"message": "…"})), "field 'error': sample 'a' failed in epoch 1"),
        (log(epoch("a", 1, target=["1", "2"])), "field 'target': 2 targets"),
        (log(epoch("a", 1, output={"choices": []})), "field 'output': it must have 'choices'"),
        (
            log(epoch("a", 1, [{"type": "image", "image": "…"}])),
            "field 'output.choices.0.message': a part of type 'image'",
        ),
        (log(epoch("a", 1, "attachment://gone")), "field 'attachments': 'attachment://gone' is missing"),
        (log(epoch("a", 0)), "field 'epoch': 0 must be a number from 1"),
        (log({"id": "a"}), "field 'epoch' is missing"),
        (log(3), "int instead of a JSON object"),
    ],
)
def test_faulty_logs_of_inspect_are_refused_by_sample_and_field(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(SuiteError, match=message):
        read_questions(write(tmp_path / "log.json", document))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"_journal/start.json": {}}, "'header.json' is missing: the run has not ended"),
        ({"x": "y"}, "'header.json' is missing: it is no log of Inspect"),
        ({"header.json": "{"}, "header.json: not JSON"),
        ({"header.json": log(version=1)}, "header.json, field 'version': 1 is not known"),
        (pack(log(epoch("a", 1, target=None))), r"samples/a_epoch_1\.json, field 'target'"),
    ],
)
def test_faulty_archives_of_inspect_are_refused_by_member(
    tmp_path: Path, members: dict[str, Any], message: str
) -> None:
    with pytest.raises(SuiteError, match=message):
        read_questions(write(tmp_path / "log.eval", members))


def test_an_archive_that_was_cut_off_or_never_there_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "log.eval", pack(log(epoch("a", 1))))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(SuiteError, match="no archive of Inspect"):
        read_questions(path)
    with pytest.raises(SuiteError, match="No such file"):
        read_questions(tmp_path / "gone.eval")
