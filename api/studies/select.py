"""``reasoner select`` and ``reasoner eval --candidates``: rank candidates of a file, and measure the rules that can.

``select`` submits a job for each question to a service; ``eval`` ranks in this process, with an engine of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from api.cli.console import count_progress, print_json, result_console
from api.cli.job_options import list_more_models, parse_word_or_json
from api.cli.jobs import open_service
from api.cli.options import ServiceOptions, expand_options
from api.cli.render import plain
from api.roles.private_service import run_private_engine
from reasoner.admission.resolve import resolve_program_job
from reasoner.answers.spec import AnswerSpec
from reasoner.base_model import VerifierSpec
from reasoner.client import AsyncClient
from reasoner.evaluation.labelled_candidates import (
    RANKINGS_FILE,
    RankedQuestion,
    RankingFile,
    RuleAccuracy,
    identify,
    measure_rules,
    rank_questions,
)
from reasoner.evaluation.logs.log_format import LabelledCandidates
from reasoner.evaluation.logs.registry import read_questions
from reasoner.evaluation.runs import EvaluationMismatch
from reasoner.evaluation.suites.suite import SuiteError
from reasoner.evaluation.unpinned_engine import UnpinnedEngine
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest, Selection
from reasoner.run import run_job
from workers.config.settings import Settings
from workers.engines.connect import connect
from workers.processes import shutdown

Rank = Callable[[LabelledCandidates], Awaitable[RankedQuestion]]
_MAX_CHARS = 60
_MAX_EXPLAINED = 10
"""Questions without a ranking whose reasons are printed."""

_progress = Console(stderr=True)


@expand_options
def select(
    file: Annotated[
        Path, typer.Argument(help='JSON Lines: {"question": …, "candidates": […], "answer": …}; answers are optional.')
    ],
    service: ServiceOptions,
    by: Annotated[
        str | None,
        typer.Option(help="verifier, majority, weighted or tournament; default: the verifier, if any."),
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="Of a tournament: knockout, swiss or pivot.")] = None,
    verifier: Annotated[str | None, typer.Option(help="Verifier: its kind, or the field of a job as JSON.")] = None,
    answer: Annotated[str | None, typer.Option(help="How answers are compared: math, text, choice or code.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Budget of each question: the verifier's tokens.")] = None,
    model: Annotated[str | None, typer.Option(help="A served model; its defaults choose the verifier.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions, at most.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Questions ranked at the same time.")] = 8,
    out: Annotated[
        Path | None, typer.Option(help=f"Folder for {RANKINGS_FILE}: the same command continues where it stopped.")
    ] = None,
) -> None:
    """Rank candidates that were drawn elsewhere: one job for each question of a file.

    With right answers in the file it reports the accuracy of the first candidate, of votes, of the best score and of an
    ideal choice. Uses the service at --url or on the configured port; if none runs there, starts one.
    """
    questions = _read_file(file, limit)
    kind = parse_word_or_json("verifier", verifier)
    given = {
        "by": by,
        "schedule": schedule,
        "verifier": {"kind": kind} if isinstance(kind, str) else kind,
        "answer": parse_word_or_json("answer", answer),
        "budget": None if tokens is None else {"tokens": tokens},
    }
    fields = {name: value for name, value in given.items() if value is not None}
    _check_fields(questions[0], fields)
    header = {"questions": identify(questions), "fields": fields, "model": model}
    with _open_file(header, out) as rankings:
        if len(rankings.items) < len(questions):
            more = list_more_models(fields.get("verifier"), None)
            with open_service(service, model, more) as (client, name):
                fields |= {} if name is None else {"model": name}
                shutdown.run(
                    _select_all(
                        client.url,
                        service.key,
                        questions=questions,
                        fields=fields,
                        rankings=rankings,
                        concurrency=concurrency,
                    )
                )
    spec = AnswerSpec.model_validate(fields["answer"]) if "answer" in fields else AnswerSpec()
    _report(questions, rankings, spec, service.as_json)


def evaluate_candidates(
    path: Path,
    settings: Settings,
    verifier: VerifierSpec | None,
    more: dict[str, str],
    limit: int,
    concurrency: int,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Rank the candidates of a file by the verifier, and report the accuracy of each rule."""
    questions = _read_file(path, limit)
    if any(question.gold is None for question in questions):
        raise typer.BadParameter(f"{path}: each line needs the right 'answer' (or 'gold')", param_hint="--candidates")
    header = {"questions": identify(questions), "model": settings.model_name, "verifier": repr(verifier)}
    with _open_file(header, out) as rankings:
        if len(rankings.items) < len(questions):
            with run_private_engine(settings, _progress, more) as urls:
                shutdown.run(
                    _evaluate_all(
                        settings,
                        urls,
                        verifier=verifier,
                        questions=questions,
                        rankings=rankings,
                        concurrency=concurrency,
                    )
                )
    _report(questions, rankings, AnswerSpec(), as_json)


def _read_file(path: Path, limit: int | None) -> list[LabelledCandidates]:
    try:
        return read_questions(path, limit)
    except SuiteError as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from None


def _check_fields(question: LabelledCandidates, fields: dict[str, Any]) -> None:
    """Raise ``typer.BadParameter`` for fields that no job can have, before a service is started."""
    try:
        Selection.model_validate(question.to_spec(**fields)).to_job()
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise typer.BadParameter(f"{place}: {first['msg']}" if place else first["msg"]) from None


@contextlib.contextmanager
def _open_file(header: dict[str, Any], out: Path | None) -> Iterator[RankingFile]:
    try:
        with RankingFile(header, out) as rankings:
            yield rankings
    except EvaluationMismatch as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None


async def _select_all(
    url: str,
    key: str | None,
    questions: list[LabelledCandidates],
    fields: dict[str, Any],
    rankings: RankingFile,
    concurrency: int,
) -> None:
    strategy = {"name": "select"} | {name: fields.pop(name) for name in ("by", "schedule") if name in fields}
    async with AsyncClient(url, key) as client:

        async def rank(question: LabelledCandidates) -> RankedQuestion:
            spec = question.to_spec(strategy=strategy, **fields)
            # The same run finds its jobs again, so that one that was killed pays for nothing twice.
            job = await client.submit(spec, idempotency_key=f"{rankings.run}-{question.id}")
            job = await client.wait(job.id)
            if job.result is None or not job.result.ranking:
                return RankedQuestion(question.id, [], failed=job.status if job.error is None else job.error.message)
            spent = job.usage.verifier_computed
            return RankedQuestion(question.id, job.result.ranking, job.result.answer, spent)

        await _rank_with_progress(questions, rank, rankings, concurrency)


async def _evaluate_all(
    settings: Settings,
    urls: tuple[str, ...],
    verifier: VerifierSpec | None,
    questions: list[LabelledCandidates],
    rankings: RankingFile,
    concurrency: int,
) -> None:
    engine = connect(settings, urls)

    async def rank(question: LabelledCandidates) -> RankedQuestion:
        given = question.to_spec(model=settings.model_name, seed=1, verifier=verifier and verifier.model_dump())
        job = resolve_program_job(JobRequest.model_validate(given), settings.models)
        outcome = await run_job(job, UnpinnedEngine(engine), MemoryJournal())
        spent = outcome.usage.verifier_computed
        return RankedQuestion(question.id, outcome.result.ranking, outcome.result.answer, spent)

    try:
        await _rank_with_progress(questions, rank, rankings, concurrency)
    finally:
        await engine.close()


async def _rank_with_progress(
    questions: list[LabelledCandidates], rank: Rank, rankings: RankingFile, concurrency: int
) -> None:
    with count_progress(_progress, transient=True, shows_remaining=True) as bar:
        task = bar.add_task("ranking", total=len(questions))
        await rank_questions(
            questions,
            rank,
            file=rankings,
            concurrency=concurrency,
            advance=lambda done: bar.update(task, completed=done),
        )


def _report(questions: list[LabelledCandidates], rankings: RankingFile, spec: AnswerSpec, as_json: bool) -> None:
    """Print the rankings and, where right answers are known, the accuracy of each rule."""
    failed = [item for item in rankings.items if item.failed is not None]
    measured: list[RuleAccuracy] = []
    if any(question.gold is not None for question in questions):
        measured = shutdown.run(measure_rules(questions, rankings.items, spec))
    if as_json:
        items = [RankingFile.adapter.dump_python(item, mode="json") for item in rankings.items]
        print_json({"accuracy": [asdict(row) for row in measured], "rankings": items})
    elif measured:
        _print_accuracy(measured, len(rankings.items) - len(failed))
    else:
        _print_rankings(questions, rankings.items)
    for item in failed[:_MAX_EXPLAINED]:
        _progress.print(f"{item.question} was not ranked: {plain(item.failed or '')}", markup=False)
    if len(failed) > _MAX_EXPLAINED:
        _progress.print(f"and {len(failed) - _MAX_EXPLAINED} more were not", markup=False)
    if failed:
        raise typer.Exit(1)


def _print_accuracy(measured: list[RuleAccuracy], count: int) -> None:
    table = Table("choice", "right", "accuracy", "95 % interval", box=SIMPLE_HEAD, pad_edge=False)
    for row in measured:
        table.add_row(row.rule, f"{row.right} of {count}", f"{row.accuracy:.3f}", f"{row.low:.3f} – {row.high:.3f}")
    result_console().print(table)


def _print_rankings(questions: list[LabelledCandidates], items: list[RankedQuestion]) -> None:
    by_id = {item.question: item for item in items}
    table = Table("question", "rank", "candidate", "answer", "score", Column("share", justify="right"), box=SIMPLE_HEAD)
    for question in questions:
        ranking = by_id[question.id].ranking
        for place, item in enumerate(ranking if len(questions) == 1 else ranking[:1], 1):
            score = item.score if item.strength is None else item.strength
            share = item.share if item.best is None else item.best
            table.add_row(
                plain(question.question[:_MAX_CHARS]),
                str(place),
                str(item.index),
                plain(item.answer or "–"),
                "–" if score is None else f"{score:.3f}",
                "–" if share is None else f"{share:.3f}",
            )
    result_console().print(table)
