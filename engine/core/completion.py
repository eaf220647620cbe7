"""When a branch ends, and what its client hears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from engine.protocol.types import Completion, Delta, FinishReason, ScoreResult
from engine.scheduler.sequence import GenerateSequence, ScoreSequence
from engine.text.detokenizer import held_back, stops_from

_T = TypeVar("_T")

Ending = tuple[FinishReason, str | int | None]


def portions(sequence: GenerateSequence, drawn: Sequence[int], path: Sequence[int]) -> list[list[int]]:
    """Which of the tokens that a branch drew it receives, in portions of which only the last token can end it.

    ``drawn``: all of them; ``path``: the guesses that were right (``engine.speculation.verify.accepted``). No guess is
    one of ``sequence.ends``, and there is room for the token after them: only a stop string can end before it.
    """
    places, stops = [0, *(guess + 1 for guess in path)], sequence.stop_strings
    if stops is None or not any(stops.may_end(drawn[place]) for place in places):
        return [places]
    return [[place] for place in places]


def ending(sequence: GenerateSequence, token: int, context: int) -> Ending | None:
    """Why the branch ends with the token that it just received, and the stop that did it; ``None`` if it goes on."""
    if token in sequence.ends:
        return "stop", token
    stops = sequence.stop_strings
    if stops is not None and len(sequence.written) <= sequence.sampling.min_tokens:
        sequence.reader.advance()
        sequence.checked = max(sequence.checked, len(sequence.reader.text))
    elif stops is not None and stops.may_end(token):
        sequence.reader.advance()
        stop = stops.find(sequence.reader.text, sequence.checked)
        if stop is not None:
            return "stop", stop
        sequence.checked = max(sequence.checked, len(sequence.reader.text))
    if len(sequence.written) - len(sequence.branch.generated) >= sequence.branch.max_tokens:
        return "length", None
    if len(sequence.tokens) >= context:
        return "context", None
    return None


def next_delta(sequence: GenerateSequence) -> Delta | None:
    """What can be streamed of a branch that goes on: no half character, nothing that may become a stop string."""
    sequence.reader.advance()
    text = sequence.reader.text
    return _delta(sequence, text[: len(text) - held_back(text, sequence.sampling.stop)])


def completion(sequence: GenerateSequence, reason: Ending) -> tuple[Delta | None, Completion]:
    """The branch's answer, and before it the rest of its stream (if it streams)."""
    finish_reason, stop = reason
    tokens = sequence.new_tokens
    ended = finish_reason == "stop" and stop in sequence.eos
    text = sequence.reader.final(len(sequence.written) - ended)
    if isinstance(stop, str) and not sequence.sampling.include_stop_str_in_output:
        # Before ``min_tokens`` the text may have others.
        text = text[: text.index(stop, stops_from(stop, sequence.checked))]
    answer = Completion(
        index=sequence.index,
        token_ids=tuple(tokens),
        text=text[sequence.start :],
        finish_reason=finish_reason,
        stop=stop,
        logprob=sequence.logprob,
        prompt_tokens=sequence.prefix,
        cached_tokens=sequence.cached or 0,
        logprobs=_tuple(sequence.logprobs),
        prompt_logprobs=_tuple(sequence.prompt_logprobs),
        drafted_tokens=sequence.drafted,
        accepted_tokens=sequence.accepted,
    )
    rest = _rest(sequence, text) if sequence.job.stream else None
    return (rest if rest and (rest.text or rest.token_ids) else None), answer


def score_result(sequence: ScoreSequence, *, declined: bool) -> ScoreResult:
    """The answer of an item that was computed, or that ``max_compute`` did not allow to compute."""
    cached = sequence.cached or 0
    return ScoreResult(
        index=sequence.index,
        values=None if declined else tuple(sequence.values[position] for position in sequence.reads),
        computed_tokens=len(sequence.tokens) - cached,
        cached_tokens=cached,
    )


def _delta(sequence: GenerateSequence, text: str) -> Delta | None:
    if len(text) <= sequence.sent:
        return None
    delta = _rest(sequence, text)
    sequence.sent, sequence.sent_tokens = len(text), len(sequence.written) - len(sequence.branch.generated)
    return delta


def _rest(sequence: GenerateSequence, text: str) -> Delta:
    """What of the text and the tokens was not streamed yet."""
    sent = sequence.sent_tokens
    logprobs = None if sequence.logprobs is None else tuple(sequence.logprobs[sent:])
    start = len(sequence.branch.generated) + sent
    return Delta(sequence.index, text[sequence.sent :], tuple(sequence.written[start:]), logprobs)


def _tuple(values: list[_T] | None) -> tuple[_T, ...] | None:
    return None if values is None else tuple(values)
