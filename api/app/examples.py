"""What the OpenAPI document shows: one job from its submission to its result, and what every call answers about it.

They are made of the models and functions that the answers are made of, so they cannot fall behind.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from api.http.problems import FieldProblem, ProblemDocument
from api.http.search_tree import build_tree
from api.openai.chat.answer import build_completion
from api.openai.errors import ErrorBody, ErrorDocument
from api.openai.narration import Narration
from api.openai.responses.body import EchoedFields
from api.openai.responses.items import ListItems, list_input_items
from api.openai.responses.object import Response
from engine.protocol.types import ModelInfo
from reasoner.answers.votes import Vote
from reasoner.budget.spec import Budget
from reasoner.budget.usage import Usage
from reasoner.jobs.batch import Batch, BatchBudget, BatchJob
from reasoner.jobs.event import Event
from reasoner.jobs.job import Job, JobResult
from reasoner.jobs.spec import JobSpec, StrategySpec
from reasoner.jobs.verifier_specs import PrmVerifier
from reasoner.strategies.registry import describe_strategies
from workers.store.keys import Key, NewKey

JOB = "job_4f1d8f0a6c1e4b7d9a52c3e8b7d6f510"
BATCH = "batch_90b1c6f2d3e44f8fa2c17b5d6e8f9a01"
KEY = "key_5d1c8e7fa2b39046"
RESPONSE = JOB.replace("job_", "resp_")
IDS = {"job_id": JOB, "batch_id": BATCH, "key_id": KEY, "response_id": RESPONSE, "model": "policy"}
"""By the name of the parameter."""

_NOON = 1_767_268_800.0
_QUESTION = "Use the numbers 3, 5, 7 to make 26."
_TEXT = "3 * 7 = 21\n\n21 + 5 = 26\n\nThe answer is \\boxed{3 * 7 + 5}."
_SPEC = JobSpec(
    problem=_QUESTION,
    model="policy",
    strategy=StrategySpec.model_validate({"name": "best_of_n", "n": 2}),
    budget=Budget(tokens=4000, seconds=20),
    verifier=PrmVerifier(model="prm"),
    seed=7,
)
_USAGE = Usage(prompt=46, cached=22, generated=71, verifier_computed=98, seconds=0.8, flops=3.1e9)
_RESULT = JobResult(
    answer="3 * 7 + 5",
    text=_TEXT,
    confidence=0.97,
    votes=[Vote(answer="3 * 7 + 5", count=1, weight=0.97), Vote(answer="3 + 5 * 7", count=1, weight=0.08)],
    finish_reason="answer",
    node="0",
)
_ENDED = Job(
    id=JOB,
    status="completed",
    created_at=_NOON,
    started_at=_NOON + 0.02,
    finished_at=_NOON + 0.85,
    attempt=1,
    last_seq=8,
    spec=_SPEC,
    usage=_USAGE,
    result=_RESULT,
)
_CANCELLED = _ENDED.model_copy(
    update={"status": "cancelled", "result": _RESULT.model_copy(update={"finish_reason": "cancelled"})}
)
_QUEUED = Job(id=JOB, status="queued", created_at=_NOON, last_seq=1, spec=_SPEC)


def _node(seq: int, name: str, text: str, tokens: int, answer: str) -> Event:
    data = {"node": name, "parent": "", "text": text, "tokens": tokens, "logprob": -4.2, "final": True}
    told = data | {"reason": "stop", "answer": answer, "part": 0, "fresh": False}
    return Event(seq=seq, type="node", at=_NOON + 0.4, key=f"complete:{name}:0", data=told)


def _score(seq: int, name: str, score: float) -> Event:
    data = {"node": name, "scores": [score, score], "score": score, "computed": 49, "cached": 23}
    return Event(seq=seq, type="score", at=_NOON + 0.6, key=f"score:{name}", data=data)


_EVENTS = [
    Event(seq=1, type="job.queued", at=_NOON, data={}),
    Event(seq=2, type="job.started", at=_NOON + 0.02, data={"attempt": 1}),
    _node(3, "0", _TEXT, 36, "3 * 7 + 5"),
    _node(4, "1", "5 * 7 = 35\n\n35 + 3 = 38\n\nThe answer is \\boxed{3 + 5 * 7}.", 35, "3 + 5 * 7"),
    _score(5, "0", 0.97),
    _score(6, "1", 0.08),
    Event(seq=7, type="select", at=_NOON + 0.84, key="select", data={"node": "0"}),
    Event(
        seq=8,
        type="job.completed",
        at=_NOON + 0.85,
        data={"result": _RESULT.model_dump(), "error": None, "usage": _USAGE.model_dump()},
    ),
]
_NARRATION = Narration(_SPEC.model_dump())
for _event in _EVENTS:
    _NARRATION.add(_event)
assert _NARRATION.end is not None

_DOCUMENT = _ENDED.model_dump()
_CHAT = build_completion(_DOCUMENT, _NARRATION, _NARRATION.end).model_dump()
_RESPONSE = Response.from_job(_DOCUMENT, EchoedFields(), _NARRATION).model_dump()
_BATCH = Batch(
    id=BATCH,
    status="completed",
    created_at=_NOON,
    finished_at=_NOON + 0.85,
    budget=BatchBudget(tokens=2000),
    metadata={"course": "numbers"},
    usage=_USAGE,
    counts={"queued": 0, "in_progress": 0, "completed": 1, "incomplete": 0, "failed": 0, "cancelled": 0},
    unassigned=2000 - _USAGE.total,
    jobs=[BatchJob(id=JOB, status="completed", answer=_RESULT.answer, tokens=_USAGE.total, granted=500)],
)
_KEY = Key(
    id=KEY,
    name="notebook",
    owner="ann",
    scopes=["jobs:read", "jobs:write"],
    created_at=_NOON,
    expires_at=_NOON + 2_592_000,
    revoked_at=None,
)
_MODEL = {
    "object": "model",
    "created": 0,
    "owned_by": "reasoner",
    **asdict(ModelInfo("policy", "generate", 4096, 4096, 10**7)),
}
_REVOKED = _KEY.model_copy(update={"revoked_at": _NOON + 60})


def _page(shown: dict[str, Any]) -> dict[str, Any]:
    return {"data": [shown], "first_id": shown["id"], "last_id": shown["id"], "has_more": False}


def _stream(*events: Event) -> str:
    """As ``GET /v1/jobs/{job_id}/events`` sends them."""
    told = [f"id: {event.seq}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n" for event in events]
    return "".join(told)


PROBLEM = ProblemDocument(
    type="urn:reasoner:problem:invalid-request",
    title="Unprocessable Entity",
    status=422,
    detail="budget.token: there is no such field; known here are tokens, seconds, flops, cost, effort",
    request_id="3f0c2b1e9d8a4756b1c0d2e3f4a5b6c7",
    errors=[
        FieldProblem(
            field="budget.token", message="there is no such field; known here are tokens, seconds, flops, cost, effort"
        )
    ],
).model_dump()
OPENAI_ERROR = ErrorDocument(
    error=ErrorBody(
        message="there is no model 'gpt'; served are policy",
        type="invalid_request_error",
        param="model",
        code="model_not_found",
    )
).model_dump()

BODIES: dict[str, dict[str, Any]] = {
    "POST /v1/jobs": {
        "search": {
            "summary": "A search with a budget",
            "value": {
                "problem": _QUESTION,
                "strategy": {"name": "beam", "n": 16},
                "budget": {"tokens": 4000, "seconds": 20},
            },
        },
        "effort": {
            "summary": "As much as it takes to be sure",
            "value": {
                "messages": [{"role": "user", "content": _QUESTION}],
                "strategy": {"name": "auto"},
                "budget": {"effort": "medium"},
                "confidence": 0.9,
                "seed": 7,
                "metadata": {"course": "numbers"},
            },
        },
    }
}
"""By call, for those whose routes bring none."""

ANSWERS: dict[str, dict[int, Any]] = {
    "GET /v1/jobs/export": {200: json.dumps(_ENDED.model_dump(), separators=(",", ":")) + "\n"},
    "POST /v1/jobs": {202: _QUEUED.model_dump(), 200: _ENDED.model_dump()},
    "GET /v1/jobs": {200: _page(_ENDED.model_dump())},
    "GET /v1/jobs/{job_id}": {200: _ENDED.model_dump()},
    "GET /v1/jobs/{job_id}/events": {200: _stream(*_EVENTS[:3])},
    "GET /v1/jobs/{job_id}/tree": {200: build_tree(JOB, _EVENTS).model_dump()},
    "POST /v1/jobs/{job_id}/cancel": {200: _CANCELLED.model_dump(), 202: _QUEUED.model_dump()},
    "POST /v1/jobs/{job_id}/retry": {202: _QUEUED.model_dump()},
    "POST /v1/batches": {202: _BATCH.model_dump()},
    "GET /v1/batches": {200: _page(_BATCH.model_dump() | {"jobs": None})},
    "GET /v1/batches/{batch_id}": {200: _BATCH.model_dump()},
    "POST /v1/batches/{batch_id}/cancel": {200: _BATCH.model_dump(), 202: _BATCH.model_dump()},
    "POST /v1/chat/completions": {200: _CHAT},
    "POST /v1/responses": {200: _RESPONSE},
    "GET /v1/responses/{response_id}": {200: _RESPONSE},
    "GET /v1/responses/{response_id}/input_items": {
        200: list_input_items(_ENDED.model_dump(), EchoedFields(), ListItems()).model_dump()
    },
    "POST /v1/responses/{response_id}/cancel": {200: _RESPONSE},
    "DELETE /v1/responses/{response_id}": {200: {"id": RESPONSE, "object": "response", "deleted": True}},
    "POST /v1/keys": {201: NewKey(**_KEY.model_dump(), key="rk_5d1c8e7fa2b39046_" + "0" * 64).model_dump()},
    "GET /v1/keys": {200: _page(_KEY.model_dump())},
    "GET /v1/keys/{key_id}": {200: _KEY.model_dump()},
    "DELETE /v1/keys/{key_id}": {200: _REVOKED.model_dump()},
    "GET /v1/strategies": {
        200: {
            "default": "best_of_n",
            "data": [
                {"name": name, "available": True, **schema} for name, schema in [*describe_strategies().items()][:1]
            ],
        }
    },
    "GET /v1/models": {200: {"object": "list", "data": [_MODEL]}},
    "GET /v1/models/{model}": {200: _MODEL},
    "GET /metrics": {200: '# TYPE reasoner_jobs gauge\nreasoner_jobs{status="queued"} 0.0\n'},
    "GET /healthz": {200: {"status": "ok"}},
    "GET /readyz": {200: {"status": "ready", "broker": "ok", "engine": "ok", "engines": []}},
}
"""By call and status."""

_CHUNK = {
    **{name: _CHAT[name] for name in ("id", "created", "model")},
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
}
_WAITING = Response.from_job(_QUEUED.model_dump(), EchoedFields(), Narration(_SPEC.model_dump())).model_dump()
_FIRST = {"type": "response.queued", "sequence_number": 1, "response": _WAITING}
_FIRST_EVENT = f"event: response.queued\ndata: {json.dumps(_FIRST)}\n\n"
STREAMS = {
    "POST /v1/chat/completions": f"data: {json.dumps(_CHUNK)}\n\ndata: [DONE]\n\n",
    "POST /v1/responses": _FIRST_EVENT,
    "GET /v1/responses/{response_id}": _FIRST_EVENT,
}
"""How a stream begins, for calls that also answer without one."""
