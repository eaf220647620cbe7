"""Jobs that earlier versions have stored are run and shown as they were.

``stored_jobs.jsonl`` was written by the version in which a job was still what its client had sent: a line for each job
as it was accepted, some with the journal and the result of their search.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reasoner.budget.usage import Usage
from reasoner.jobs.journal import Entry, MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import run_job
from tests.scripted import ScriptedEngine

STORED = [
    json.loads(line) for line in Path(__file__).with_name("stored_jobs.jsonl").read_text(encoding="utf-8").splitlines()
]
NAMES = [stored["name"] for stored in STORED]
SEARCHED = [stored for stored in STORED if "journal" in stored]


@pytest.mark.parametrize("stored", STORED, ids=NAMES)
def test_a_stored_job_is_echoed_as_it_was_accepted(stored: dict[str, Any]) -> None:
    assert json.loads(JobSpec.model_validate_json(json.dumps(stored["spec"])).model_dump_json()) == stored["spec"]


@pytest.mark.parametrize("stored", SEARCHED, ids=[stored["name"] for stored in SEARCHED])
async def test_a_stored_journal_is_replayed_without_a_request(stored: dict[str, Any]) -> None:
    entries = [Entry(**entry | {"spend": Usage.model_validate(entry["spend"])}) for entry in stored["journal"]]
    journal, engine = MemoryJournal(entries), ScriptedEngine(probes=True)
    outcome = await run_job(JobSpec.model_validate(stored["spec"]), engine, journal)
    assert json.loads(outcome.result.model_dump_json()) == stored["result"]
    assert not engine.requests
    assert len(journal.entries) == len(entries)
