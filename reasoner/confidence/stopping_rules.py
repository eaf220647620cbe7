"""When a vote has heard enough.

A rule looks at the answers that samples have given and says how many samples in all it is *certain* to need. When that
many have been heard, the vote is over. Until then, starting that many at once wastes nothing: no rule can stop before
it has heard them. What is certain to be needed never shrinks, so a vote that starts just that many ends after the same
samples in whatever order they arrive, namely those after which one sample at a time would have stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from reasoner.confidence.posterior import leader_probability

ReceivedAnswers = Mapping[int, int | None]
"""The class of each sample's answer by the sample's number, counted from 0; ``None`` for one without an answer.
Samples that are still on their way are missing."""


def num_needed_by_beta(heard: ReceivedAnswers, n: int, threshold: float) -> int:
    """Stops when the leader would stay the leader with probability ``threshold``, or after ``n`` samples.

    It also stops when the samples that are left cannot change the winner. Source: Aggarwal et al. 2023, "Let's Sample
    Step by Step: Adaptive-Consistency", section 3.2 (the Beta criterion).
    """
    counts = sorted(Counter(answer for answer in heard.values() if answer is not None).values(), reverse=True)
    leader, runner_up = (*counts, 0, 0)[:2]
    left = n - len(heard)
    for more in range(left):  # the soonest end is when all that follows votes for the leader
        settled = leader + more - runner_up > left - more
        if settled or leader_probability((leader + more, runner_up)) >= threshold:
            return len(heard) + more
    return n


def num_needed_by_window(heard: ReceivedAnswers, n: int, window: int) -> int:
    """Stops when all samples of one window (the first ``window``, the next, …) give the same answer, or after ``n``.

    A sample without an answer agrees with none. Samples of earlier windows that are still on their way are waited for.
    Source: Li et al. 2024, "Escape Sky-high Cost: Early-stopping Self-Consistency for Multi-step Reasoning", section
    2.2.
    """
    for start in range(0, n - window, window):
        answers = {heard[number] for number in range(start, start + window) if number in heard}
        if len(answers) <= 1 and None not in answers:
            return len(heard) + sum(number not in heard for number in range(start + window))
    return n
