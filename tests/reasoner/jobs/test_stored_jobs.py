"""Jobs that earlier versions have stored are run and shown as they were.

``stored_jobs.jsonl`` was written by the version in which a job was still what its client had sent: a line for each job
as it was accepted, some with the journal and the result of their search.

``stored_chat_jobs.jsonl`` was written by the version that packed the texts of chat servers into integers: jobs that had
begun, with the requests and answers by which that version went on with them, and their result and nodes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.remote.chat.options import ChatOptions
from reasoner.budget.usage import Usage
from reasoner.jobs.journal import Entry, MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.view import fold_events
from reasoner.run import run_job
from tests.engine.remote.test_chat import Hosted, fresh, stream
from tests.scripted import ScriptedEngine

__all__ = ["fresh"]  # the fixture holds here, too


def read_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()]


def read_journal(stored: dict[str, Any]) -> list[Entry]:
    return [Entry(**entry | {"spend": Usage.model_validate(entry["spend"])}) for entry in stored["journal"]]


STORED = read_lines("stored_jobs.jsonl")
CHAT = read_lines("stored_chat_jobs.jsonl")
NAMES = [stored["name"] for stored in STORED]
SEARCHED = [stored for stored in STORED if "journal" in stored]


@pytest.mark.parametrize("stored", STORED, ids=NAMES)
def test_a_stored_job_is_echoed_as_it_was_accepted(stored: dict[str, Any]) -> None:
    assert json.loads(JobSpec.model_validate_json(json.dumps(stored["spec"])).model_dump_json()) == stored["spec"]


@pytest.mark.parametrize("stored", SEARCHED, ids=[stored["name"] for stored in SEARCHED])
async def test_a_stored_journal_is_replayed_without_a_request(stored: dict[str, Any]) -> None:
    entries = read_journal(stored)
    journal, engine = MemoryJournal(entries), ScriptedEngine(probes=True)
    outcome = await run_job(JobSpec.model_validate(stored["spec"]), engine, journal)
    assert json.loads(outcome.result.model_dump_json()) == stored["result"]
    assert not engine.requests
    assert len(journal.entries) == len(entries)


@pytest.mark.parametrize("stored", CHAT, ids=[stored["name"] for stored in CHAT])
async def test_a_stored_job_of_a_chat_server_goes_on_with_the_same_requests(stored: dict[str, Any]) -> None:
    left = list(stored["exchanges"])

    def answer(body: dict[str, Any]) -> Any:
        [exchange] = [exchange for exchange in left if exchange[0] == body]
        left.remove(exchange)
        return stream(*exchange[1])

    hosted = Hosted(answer, ChatOptions(("m",), prefill=stored["prefill"]))
    journal = MemoryJournal(read_journal(stored))
    outcome = await run_job(JobSpec.model_validate(stored["spec"]), hosted.engine, journal)
    await hosted.engine.close()
    assert not left
    assert json.loads(outcome.result.model_dump_json()) == stored["result"]
    nodes = fold_events(journal.entries).nodes.values()
    assert [[node.id, node.text, node.tokens, node.reason] for node in nodes] == stored["nodes"]
