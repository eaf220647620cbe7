"""Rollouts of real searches: what the journal recorded is what the engine computed."""

from __future__ import annotations

from typing import Any

import pytest

from reasoner.training_data.recorded_job import LeftOut, RecordedJob
from reasoner.training_data.rollouts import build_rollouts, build_tree
from tests.long import mostly_long
from tests.reasoner.training_data.recorded import TellingEngine, search, tell
from tests.strategies import COMPARING, WRITING


def check_rollouts(job: RecordedJob) -> int:
    """Check the rows of a job, and return the number of trained tokens."""
    rows = build_rollouts(job, None)
    through: dict[str, list[int]] = {}
    for row in rows:
        ids, mask, logprobs = row["response_ids"], row["response_mask"], row["response_logprobs"]
        assert len(ids) == len(mask) == len(logprobs) == row["path_ends"][-1]
        for node, end in zip(row["path"], row["path_ends"], strict=True):
            prefix = row["prompt_ids"] + ids[:end]
            assert through.setdefault(node, prefix) == prefix
        start = len(row["prompt_ids"])
        for at, (token, is_trained, logprob) in enumerate(zip(ids, mask, logprobs, strict=True)):
            assert logprob == (tell(token, start + at) if is_trained else 0.0)
    for row in rows:
        for parent, node in zip(row["path"], row["path"][1:], strict=False):
            assert through[node][: len(through[parent])] == through[parent]
    return sum(sum(row["response_mask"][row["shared_tokens"] :]) for row in rows)


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("name", mostly_long(WRITING, every=4))
async def test_each_generated_token_is_trained_once_with_its_logprob_at_its_position(name: str, thinks: bool) -> None:
    more: dict[str, Any] = {} if name in COMPARING else {"verifier": {"kind": "prm"}}
    job = await search(TellingEngine(thinks=thinks), strategy={"name": name}, **more)
    written = sum(
        sum(job.tokens[name].mask)
        for name, node in job.view.nodes.items()
        if node.is_solution and not job.tokens[name].is_copy
    )
    assert check_rollouts(job) == written > 0


async def test_a_tree_tells_the_tokens_of_each_node() -> None:
    job = await search(TellingEngine(), strategy={"name": "beam", "n": 4})
    (tree,) = build_tree(job)
    through = {"": tree["prompt_ids"]}
    for node in tree["nodes"]:
        assert node["token_ids"] is not None
        assert node["logprobs"] is not None
        assert len(node["token_ids"]) == len(node["logprobs"]) == len(node["mask"])
        start = len(through[node["parent"]])
        told = [tell(token, start + at) for at, token in enumerate(node["token_ids"])]
        assert node["logprobs"] == told
        through[node["id"]] = through[node["parent"]] + node["token_ids"]
    assert {row["node"]: row["prompt_ids"] + row["response_ids"] for row in build_rollouts(job, None)}.items() <= (
        through.items()
    )


async def test_a_job_that_records_nothing_has_a_tree_without_prompts_and_no_rollouts() -> None:
    job = await search(TellingEngine(), record_logprobs=False)
    (tree,) = build_tree(job)
    assert tree["prompt_ids"] is None
    assert {node["logprobs"] for node in tree["nodes"]} == {None}
    with pytest.raises(LeftOut, match="not_recorded"):
        build_rollouts(job, None)
