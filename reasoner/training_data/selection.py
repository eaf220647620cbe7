"""Which jobs an export has, and in which form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from reasoner.base_model import StrictModel
from reasoner.jobs.job import TERMINAL_STATUSES, Status
from reasoner.jobs.view import JobView
from reasoner.training_data.formats import FORMATS
from reasoner.training_data.labels import By

MAX_TIME = 1e11
"""Latest time in seconds since the epoch: three thousand years from it."""
JOBS: Final = "jobs"
"""Format of an export without rows for training: the jobs as the API shows them."""

FormatName = Literal["jobs", "sft", "preference", "unpaired", "prm", "tree", "rollouts"]
FileKind = Literal["jsonl", "parquet"]
Time = Annotated[float, Field(ge=0, le=MAX_TIME)]
Share = Annotated[float, Field(ge=0, le=1)]


def _check_pair(value: str) -> str:
    name, sign, _ = value.partition("=")
    if not name or not sign:
        raise ValueError(f"{value!r} is no pair: write KEY=VALUE")
    return value


class ExportQuery(StrictModel):
    """The jobs of an export, and the form of its rows. All conditions that are given hold."""

    format: FormatName = Field(
        JOBS,
        description="jobs: the jobs as GET /v1/jobs/{id} shows them. Training data, with TRL's column names: sft, the "
        "chosen solutions; preference, pairs of solutions; unpaired, single ones with labels; prm, steps with labels. "
        "tree: the search tree with its tokens. rollouts: its paths with tokens, log-probabilities, mask and reward, "
        "with verl's names.",
    )
    file: FileKind = Field(
        "jsonl", description="jsonl: one row a line. parquet: a Parquet file, of training data alone."
    )
    since: Time = Field(0.0, description="Only jobs that ended then or later; continue with the last 'finished_at'.")
    after: str | None = Field(
        None,
        max_length=200,
        description="Of the jobs that ended at 'since' only those behind this one: with the last row's 'finished_at' "
        "and 'job' an export goes on where it was, and no job comes twice.",
    )
    until: Time | None = Field(None, description="Only jobs that ended before then; by default before the request.")
    status: Status | None = Field(None, description="Only jobs that ended with this status.")
    strategy: str | None = Field(None, max_length=200, description="Only jobs of this strategy.")
    model: str | None = Field(None, max_length=1000, description="Only jobs of this model, or of this name.")
    min_score: Share | None = Field(
        None, description="Only jobs whose chosen solution has this score, or a higher one."
    )
    min_confidence: Share | None = Field(
        None, description="Only jobs whose result has this confidence, or a higher one."
    )
    metadata: list[Annotated[str, AfterValidator(_check_pair)]] = Field(
        default_factory=list, max_length=16, description="Only jobs with this metadata: KEY=VALUE. May be repeated."
    )
    journal: bool = Field(False, description="Add all events of each job as its 'events'; for the format jobs alone.")
    by: By | None = Field(
        None,
        description="What says which solutions are right. score: the verifier, from 0.5 on; answer: the job's own "
        "answer. By default scores, for jobs that have some.",
    )
    margin: Share = Field(0.0, description="Least difference of the scores of a pair; for the format preference alone.")
    summary: bool = Field(
        False,
        description="End with a line that has the number of jobs and rows, and of jobs left out by reason, as "
        "'summary'. A Parquet file has the same in its metadata in any case.",
    )

    def find_contradiction(self) -> tuple[str, str] | None:
        """Return the name of a field that the others contradict, and what would be right; ``None`` if there is none."""
        given = self.model_fields_set
        ended = ", ".join(sorted(TERMINAL_STATUSES))
        formats = f"give a format, one of {', '.join(FORMATS)}"
        rules = {
            "status": (
                self.status is not None and self.status not in TERMINAL_STATUSES,
                f"only jobs that have ended are exported: give one of {ended}",
            ),
            "until": (
                self.until is not None and self.until <= self.since,
                f"no job ended before then and since {self.since}: give a later time",
            ),
            "after": (
                self.after is not None and "since" not in given,
                "give 'since' with it, the 'finished_at' of that job",
            ),
            "file": (
                self.file == "parquet" and self.format == JOBS,
                f"jobs have no fixed columns: take jsonl, or {formats}",
            ),
            "journal": (
                self.journal and self.format != JOBS,
                "rows for training have no events: leave it out, or give format=jobs",
            ),
            "margin": (
                "margin" in given and self.format != "preference",
                "only pairs have one: leave it out, or give format=preference",
            ),
            "by": (
                self.by is not None and self.format in (JOBS, "sft", "tree"),
                f"the format {self.format} has no labels and rewards: leave it out, or give another format",
            ),
            "summary": (
                self.summary and (self.format == JOBS or self.file == "parquet"),
                f"a Parquet file has it in its metadata: leave it out; for JSON Lines {formats}",
            ),
        }
        return next(((name, message) for name, (is_wrong, message) in rules.items() if is_wrong), None)

    @property
    def needs_events(self) -> bool:
        """True if the jobs' events are read."""
        return self.format != JOBS or self.journal or self.min_score is not None

    def wants(self, job: Mapping[str, Any]) -> bool:
        """Return True for a job with these properties. Its events may be needed for ``has_score``, too."""
        spec, result = job["spec"], job["result"] or {}
        models = [spec.get("model"), spec.get("name"), *(entry["model"] for entry in spec.get("models") or ())]
        confidence = result.get("confidence")
        return (
            job["status"] in TERMINAL_STATUSES  # else it is being retried
            and self.status in (None, job["status"])
            and self.strategy in (None, spec["strategy"]["name"])
            and (self.model is None or self.model in models)
            and (self.min_confidence is None or (confidence is not None and confidence >= self.min_confidence))
            and _has_metadata(spec.get("metadata") or {}, self.metadata)
        )

    def has_score(self, view: JobView) -> bool:
        """Return True if the chosen solution of a job is good enough."""
        if self.min_score is None:
            return True
        score = view.nodes[view.best].score if view.best is not None else None
        return score is not None and score >= self.min_score


def _has_metadata(metadata: Mapping[str, str], pairs: Sequence[str]) -> bool:
    return all(metadata.get(pair.partition("=")[0]) == pair.partition("=")[2] for pair in pairs)
