"""When a branch ends, and what its client hears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from engine.protocol.types import Completion, Delta, FinishReason, ScoreResult
from engine.scheduler.sequence import GenerateSequence, ScoreSequence
from engine.text.detokenizer import earliest_stop_start, num_chars_to_hold

_T = TypeVar("_T")

FinishEvent = tuple[FinishReason, str | int | None]


def split_at_possible_stops(sequence: GenerateSequence, drawn: Sequence[int], path: Sequence[int]) -> list[list[int]]:
    """Which of the tokens that a branch drew it receives, in parts that only the last token can end.

    ``drawn``: all of them; ``path``: the guesses that were right (``engine.speculation.verify.accepted``). No guess is
    one of ``sequence.ends``, and there is room for the token after them: only a stop string can end before it.
    """
    places, stops = [0, *(guess + 1 for guess in path)], sequence.stop_strings
    if stops is None or not any(stops.may_end(drawn[place]) for place in places):
        return [places]
    return [[place] for place in places]


def ending(sequence: GenerateSequence, token: int, context: int) -> FinishEvent | None:
    """Why the branch ends with the token that it just received, and the stop that did it; ``None`` if it goes on."""
    if token in sequence.stop_tokens:
        return "stop", token
    stops = sequence.stop_strings
    if stops is not None and len(sequence.generated) <= sequence.sampling.min_tokens:
        sequence.reader.advance()
        sequence.num_chars_searched = max(sequence.num_chars_searched, len(sequence.reader.text))
    elif stops is not None and stops.may_end(token):
        sequence.reader.advance()
        stop = stops.find(sequence.reader.text, sequence.num_chars_searched)
        if stop is not None:
            return "stop", stop
        sequence.num_chars_searched = max(sequence.num_chars_searched, len(sequence.reader.text))
    if len(sequence.generated) - len(sequence.branch.generated) >= sequence.branch.max_tokens:
        return "length", None
    if len(sequence.tokens) >= context:
        return "context", None
    return None


def next_delta(sequence: GenerateSequence) -> Delta | None:
    """What can be streamed of a branch that goes on: no half character, nothing that may become a stop string."""
    sequence.reader.advance()
    text = sequence.reader.text
    return _delta(sequence, text[: len(text) - num_chars_to_hold(text, sequence.sampling.stop)])


def completion(sequence: GenerateSequence, reason: FinishEvent) -> tuple[Delta | None, Completion]:
    """The branch's answer, and before it the rest of its stream (if it streams)."""
    finish_reason, stop = reason
    tokens = sequence.new_tokens
    ended = finish_reason == "stop" and stop in sequence.eos
    text = sequence.reader.final(len(sequence.generated) - ended)
    if isinstance(stop, str) and not sequence.sampling.include_stop_str_in_output:
        # Before ``min_tokens`` the text may have others.
        text = text[: text.index(stop, earliest_stop_start(stop, sequence.num_chars_searched))]
    answer = Completion(
        index=sequence.index,
        token_ids=tuple(tokens),
        text=text[sequence.text_start :],
        finish_reason=finish_reason,
        stop=stop,
        logprob=sequence.logprob,
        prompt_tokens=sequence.num_prefix_tokens,
        cached_tokens=sequence.num_cached or 0,
        logprobs=_tuple(sequence.logprobs),
        prompt_logprobs=_tuple(sequence.prompt_logprobs),
        drafted_tokens=sequence.num_drafted,
        accepted_tokens=sequence.num_accepted,
    )
    rest = _rest(sequence, text) if sequence.job.stream else None
    return (rest if rest and (rest.text or rest.token_ids) else None), answer


def score_result(sequence: ScoreSequence, *, declined: bool) -> ScoreResult:
    """The answer of an item that was computed, or that ``max_compute`` did not allow to compute."""
    cached = sequence.num_cached or 0
    return ScoreResult(
        index=sequence.index,
        values=None if declined else tuple(sequence.values[position] for position in sequence.read_positions),
        computed_tokens=len(sequence.tokens) - cached,
        cached_tokens=cached,
    )


def _delta(sequence: GenerateSequence, text: str) -> Delta | None:
    if len(text) <= sequence.num_chars_sent:
        return None
    delta = _rest(sequence, text)
    sequence.num_chars_sent, sequence.num_tokens_sent = (
        len(text),
        len(sequence.generated) - len(sequence.branch.generated),
    )
    return delta


def _rest(sequence: GenerateSequence, text: str) -> Delta:
    """What of the text and the tokens was not streamed yet."""
    sent = sequence.num_tokens_sent
    logprobs = None if sequence.logprobs is None else tuple(sequence.logprobs[sent:])
    start = len(sequence.branch.generated) + sent
    return Delta(sequence.index, text[sequence.num_chars_sent :], tuple(sequence.generated[start:]), logprobs)


def _tuple(values: list[_T] | None) -> tuple[_T, ...] | None:
    return None if values is None else tuple(values)
