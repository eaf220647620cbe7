"""Steps: a branch ends at one of some texts, so that it can be scored and expanded there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.protocol.types import Completion
from reasoner.search.branch_text import BranchText
from reasoner.search.rules.rule import Continue, End, NewBranch, NextRequest, Rule, Verdict
from reasoner.tools.calls import CallReader


@dataclass(frozen=True, slots=True)
class StepEndRule(Rule):
    """A branch ends at a stop string, unless it is too short for a step or in the middle of a call."""

    stops: tuple[str, ...]
    min_tokens: int
    splits_thinking: bool
    """True if the stop strings also apply within the thinking."""
    reader: CallReader | None
    job_stops: frozenset[str]
    """Stop strings of the job, which end a whole solution."""

    def adapt(self, text: BranchText, request: NextRequest) -> NextRequest:
        thinking, stop = text.thinking, request.sampling.stop
        if self.splits_thinking or thinking is None or thinking.state == "closed" or thinking.format.is_told:
            stop = tuple(dict.fromkeys((*self.stops, *stop)))
            return replace(request, sampling=replace(request.sampling, stop=stop))
        stop = tuple(string for string in stop if string not in self.stops)
        if thinking.state == "undecided" and self.stops:  # until then it is open which stop strings apply
            request = replace(request, max_tokens=min(request.max_tokens, len(thinking.format.opening_ids)))
        return replace(request, sampling=replace(request.sampling, stop=stop))

    async def after(self, text: BranchText, segment: Completion) -> Verdict:
        if segment.stop not in self.stops:
            return None
        is_blank = text.thinking is not None and not text.text.strip()  # line breaks between a thought and the answer
        is_in_call = self.reader is not None and self.reader.is_in_call(text.texts_between_outputs[-1])
        if is_blank or is_in_call or len(text.token_ids) < self.min_tokens:
            return Continue()
        if segment.stop in self.job_stops:
            return None
        return End("repetition" if text.is_in_loop else "step")  # a loop of whole steps would never end


def make_step_end_rule(new: NewBranch) -> StepEndRule | None:
    """Return the rule for steps, or for solutions up to a text."""
    spec, steps, until = new.search.spec, new.options.steps, new.options.until
    job_stops = frozenset(spec.stop)
    if steps is None:
        return (
            None if until is None else StepEndRule((until,), 0, splits_thinking=True, reader=None, job_stops=job_stops)
        )
    reader = new.search.calls.reader if new.search.calls is not None and new.parent.is_solution else None
    is_default = steps is spec.step_rule and spec.steps is None
    return StepEndRule(
        steps.stops, steps.min_tokens or 0, splits_thinking=not is_default, reader=reader, job_stops=job_stops
    )
