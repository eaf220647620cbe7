"""The samples that lm-evaluation-harness writes with ``--log_samples``: ``samples_TASK_DATE.jsonl``.

A line for each document and filter has ``doc_id``, ``doc``, ``target``, ``arguments``, ``resps``, ``filtered_resps``
and, since 0.4.3, ``filter``. ``arguments.gen_args_0`` has the prompt and the settings of its generation; until 0.4.2
it is a list. ``resps`` has a list for each request, of as many texts as the task has ``repeats``. Tasks that compare
log-likelihoods have no texts. Source: ``lm_eval/evaluator.py`` and ``lm_eval/loggers/evaluation_tracker.py`` of 0.4.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reasoner.evaluation.logs.log_format import (
    LabelledCandidates,
    LogFormat,
    SameCount,
    check_candidates,
    read_right_answer,
)
from reasoner.evaluation.suites.files.records import Record
from reasoner.evaluation.suites.suite import SuiteError

_QUESTION_FIELDS = ("question", "problem", "Problem", "query", "prompt")
"""Fields of common documents with the question alone; the prompt also has examples and a template."""


def read_samples(records: Iterable[Record], title: str, limit: int | None) -> list[LabelledCandidates]:
    """Return the first documents of a file, once for all filters. Raises ``SuiteError``."""
    questions: list[LabelledCandidates] = []
    responses: dict[str, Any] = {}
    by_filter: dict[str, dict[str, str]] = {}
    same = SameCount()
    for record in records:
        name, filtered = _read_id(record), str(record.fields.get("filter", "none"))
        places = by_filter.setdefault(filtered, {})
        if name in places:
            raise record.refuse(
                "doc_id", f"{name!r} is there twice for the filter {filtered!r}, also at {places[name]}"
            )
        places[name] = record.where
        texts = _read_responses(record)
        if name not in responses:
            responses[name] = texts
            same.add(record, "doc_id", name, len(texts))
            questions.append(_parse(record, f"{title}-{name}", texts))
        elif responses[name] != texts:
            raise record.refuse(
                "resps", f"document {name!r} has other responses for another filter: two runs in one file"
            )
    _check_filters(title, by_filter)
    return questions[:limit]


def _check_filters(title: str, by_filter: dict[str, dict[str, str]]) -> None:
    """Raise ``SuiteError`` if a filter lacks documents that another one has, as in a file that was cut off."""
    every = dict.fromkeys(name for places in by_filter.values() for name in places)
    for name, places in by_filter.items():
        missing = [document for document in every if document not in places]
        if missing:
            raise SuiteError(f"{title}: filter {name!r} lacks {len(missing)} documents, such as doc_id {missing[0]!r}")


def _read_id(record: Record) -> str:
    value = record.read("doc_id", "the number of the document")
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise record.refuse("doc_id", f"{value!r} must be the number of the document")
    return str(value)


def _read_responses(record: Record) -> list[str]:
    """Return the texts of the one request of a document."""
    requests = record.read("resps", "the responses, a list for each request")
    if not isinstance(requests, list) or len(requests) != 1 or not isinstance(requests[0], list):
        raise record.refuse(
            "resps", "it must be one list of texts: a task that compares log-likelihoods has no candidates"
        )
    settings = _read_arguments(record)[1:]
    if settings and not isinstance(settings[0], dict):
        raise record.refuse("arguments", "a request of log-likelihoods: only generated texts are candidates")
    return check_candidates(record, "resps.0", requests[0])


def _read_arguments(record: Record) -> list[Any]:
    """Return the arguments of the one request: its prompt, and the settings of its generation."""
    arguments = record.read("arguments", "the prompt and the settings of its generation")
    match arguments:
        case {"gen_args_0": {"arg_0": _} as request}:
            return list(request.values())
        case [[_, *_] as request, *_]:
            return list(request)
    raise record.refuse(
        "arguments", "it must have 'gen_args_0' with 'arg_0', the prompt, or be a list of a list with it"
    )


def _parse(record: Record, name: str, texts: list[str]) -> LabelledCandidates:
    document = record.read("doc", "the document of the task")
    fields = document if isinstance(document, dict) else {}
    question = next((fields[field] for field in _QUESTION_FIELDS if isinstance(fields.get(field), str)), None)
    if question is None:
        question = _read_arguments(record)[0]
    if not isinstance(question, str) or not question.strip():
        raise record.refuse("arguments", "the prompt is no text, and 'doc' has no 'question' or 'problem'")
    target = record.read("target", "the right answer")
    return LabelledCandidates(name, question.strip(), texts, read_right_answer(record, "target", target))


FORMAT = LogFormat("samples of lm-evaluation-harness", ("doc_id", "resps"), read_samples)


def refuse_old_samples(records: Iterable[Record], title: str, limit: int | None) -> list[LabelledCandidates]:  # noqa: ARG001
    """Raise ``SuiteError``: before 0.4 the harness wrote other fields, which say nothing of the responses' number."""
    record = next(iter(records))
    raise SuiteError(
        f"{record.where}: written by lm-evaluation-harness before 0.4: run it again, or convert to 'resps'"
    )


OLD_FORMAT = LogFormat("samples of lm-evaluation-harness before 0.4", ("doc_id", "truth"), refuse_old_samples)
