"""Submit a job, follow its events, and read the answer, the bill and the search tree.

Needs a running service (``reasoner serve``); ``REASONER_URL`` names another one than http://127.0.0.1:8000.
"""

from __future__ import annotations

import os

from reasoner.client import Client

URL = os.environ.get("REASONER_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("REASONER_API_KEY")

JOB = {
    "problem": "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 24.",
    "strategy": {"name": "weighted_vote", "n": 16},
    "budget": {"tokens": 4000, "seconds": 60},
    "seed": 1,
}


def main() -> None:
    with Client(URL, KEY) as client:
        job = client.submit(JOB)
        print("submitted", job.id)
        for event in client.events(job.id):  # ends with the job, and resumes by itself when the connection breaks
            print(event.seq, event.type)
        job = client.get(job.id)
        tree = client.tree(job.id)
    if job.result is None:
        print(job.status, job.error)
        return
    print(job.status, "because of", job.result.finish_reason)
    print("answer", job.result.answer, "with confidence", job.result.confidence)
    print(job.usage.generated, "tokens generated,", job.usage.verifier_computed, "computed by the verifier")
    print(len(tree["nodes"]), "nodes in the search tree")


if __name__ == "__main__":
    main()
