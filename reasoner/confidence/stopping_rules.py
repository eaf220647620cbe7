"""Stopping rules of self-consistency.

A rule takes the answers received so far and returns the total number of samples that are certain to be needed. The vote
ends when that many have been received. Starting that many in parallel wastes nothing, since no rule can stop before it
has received them. The number never decreases, so a vote that starts exactly that many ends after the same samples in
whatever order they arrive, namely those after which sequential sampling would have stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from reasoner.confidence.posterior import leader_probability

ReceivedAnswers = Mapping[int, int | None]
"""Class of each sample's answer by sample index, ``None`` for a sample without an answer. Samples that have not arrived
are missing."""


def num_needed_by_beta(received: ReceivedAnswers, n: int, threshold: float) -> int:
    """Stop when the leader would remain the leader with probability ``threshold``, or after ``n`` samples.

    Also stop when the remaining samples cannot change the winner. Samples without an answer count together as a rival.
    Source: Aggarwal et al. 2023, "Let's Sample
    Step by Step: Adaptive-Consistency", section 3.2 (the Beta criterion).
    """
    counts = sorted(Counter(answer for answer in received.values() if answer is not None).values(), reverse=True)
    leader, runner_up = (*counts, 0, 0)[:2]
    num_silent = sum(answer is None for answer in received.values())
    num_left = n - len(received)
    for more in range(num_left):  # the earliest possible end: all further samples vote for the leader
        is_decided = leader + more - runner_up > num_left - more
        if is_decided or leader_probability((leader + more, runner_up), num_silent) >= threshold:
            return len(received) + more
    return n


def num_needed_by_window(received: ReceivedAnswers, n: int, window: int) -> int:
    """Stop when all samples of one window (the first ``window``, the next, …) state the same answer, or after ``n``.

    A sample without an answer agrees with no other. Missing samples of earlier windows are still needed.
    Source: Li et al. 2024, "Escape Sky-high Cost: Early-stopping Self-Consistency for Multi-step Reasoning", section
    2.2.
    """
    for start in range(0, n - window, window):
        answers = {received[index] for index in range(start, start + window) if index in received}
        if len(answers) <= 1 and None not in answers:
            return len(received) + sum(index not in received for index in range(start + window))
    return n
