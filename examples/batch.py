"""Solve many problems under one token budget: the service spends it where it helps most.

Needs a running service (``reasoner serve``); ``REASONER_URL`` names another one than http://127.0.0.1:8000.
"""

from __future__ import annotations

import os
import time

from reasoner.client import Client

URL = os.environ.get("REASONER_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("REASONER_API_KEY")

PROBLEMS = [
    "Reach 10 from 9, 5 and 6: use each number exactly once, with + - * /.",
    "Make 27 with + - * / from the numbers 1, 7, 10 and 8, each used exactly once.",
    "Use the numbers 12, 12 and 6, each exactly once, with + - * / to reach 60.",
    "Combine 12, 12, 7, 12 and 6 with + - * / to make 33. Use each number exactly once.",
]
BUDGET_TOKENS = 6000


def main() -> None:
    strategy = {"name": "weighted_vote", "n": 64}
    jobs = [{"problem": problem, "strategy": strategy, "seed": seed} for seed, problem in enumerate(PROBLEMS)]
    with Client(URL, KEY) as client:
        batch = client.submit_batch({"jobs": jobs, "budget": {"tokens": BUDGET_TOKENS}})
        while not batch.has_ended:
            time.sleep(0.2)
            batch = client.batch(batch.id)
        for problem, short in zip(PROBLEMS, batch.jobs or (), strict=True):
            job = client.get(short.id)
            print(f"{job.usage.total:5} tokens  {job.status:10}  {job.result and job.result.answer}  <- {problem}")
    print(f"{batch.usage.total} of {BUDGET_TOKENS} tokens spent")


if __name__ == "__main__":
    main()
