"""Deltas, completions and scores, as clients receive them."""

from __future__ import annotations

from engine.core.step import Finish
from engine.protocol.types import Completion, Delta, ScoreResult
from engine.scheduler.sequence import GenerateSequence, ScoreSequence
from engine.text.detokenizer import earliest_stop_start, num_chars_to_hold


def take_delta(sequence: GenerateSequence) -> Delta | None:
    """Return the next text to stream of a running branch: whole characters that cannot become a stop string."""
    sequence.reader.advance()
    text = sequence.reader.text
    text = text[: len(text) - num_chars_to_hold(text, sequence.sampling.stop)]
    if len(text) <= sequence.num_chars_sent:
        return None
    delta = _collect_remaining(sequence, text)
    sequence.num_chars_sent = len(text)
    sequence.num_tokens_sent = len(sequence.generated) - len(sequence.branch.generated)
    return delta


def build_completion(sequence: GenerateSequence, finish: Finish) -> tuple[Delta | None, Completion]:
    """Return the last delta of a finished branch, if it streams, and its completion."""
    finish_reason, stop = finish
    ended = finish_reason == "stop" and stop in sequence.eos
    text = sequence.reader.final(len(sequence.generated) - ended)
    is_special = bool(
        sequence.stop_strings and sequence.generated and sequence.generated[-1] in sequence.stop_strings.special
    )
    if isinstance(stop, str) and not is_special and not sequence.sampling.include_stop_str_in_output:
        # An earlier occurrence, before ``min_tokens``, is part of the text.
        text = text[: text.index(stop, earliest_stop_start(stop, sequence.num_chars_searched))]
    completion = Completion(
        index=sequence.index,
        token_ids=tuple(sequence.new_tokens),
        text=text[sequence.text_start :],
        finish_reason=finish_reason,
        stop=stop,
        logprob=sequence.logprob,
        prompt_tokens=sequence.num_prefix_tokens,
        cached_tokens=sequence.num_cached or 0,
        logprobs=None if sequence.logprobs is None else tuple(sequence.logprobs),
        prompt_logprobs=None if sequence.prompt_logprobs is None else tuple(sequence.prompt_logprobs),
        drafted_tokens=sequence.num_drafted,
        accepted_tokens=sequence.num_accepted,
        dropped_tokens=_count_dropped(sequence),
        probe=sequence.probe_score,
        token_texts=_read_token_texts(sequence),
    )
    last = _collect_remaining(sequence, text) if sequence.request.stream else None
    return (last if last and (last.text or last.token_ids) else None), completion


def _count_dropped(sequence: GenerateSequence) -> int:
    """Return the number of tokens whose keys were dropped to compute the new ones. The last one is not computed."""
    if sequence.drops is None:
        return 0
    return sequence.drops.count_dropped(sequence.num_prefix_tokens - 1, sequence.num_read - 1)


def _read_token_texts(sequence: GenerateSequence) -> dict[int, str]:
    """Return the texts of the tokens in the branch's log-probabilities of the prompt."""
    scored = [token for token in sequence.prompt_logprobs or () if token is not None]
    ids = {token.token_id for token in scored} | {id for token in scored for id, _ in token.top}
    return {id: sequence.reader.tokenizer.inner_piece(id) for id in ids}


def build_score_result(sequence: ScoreSequence, *, is_over_budget: bool) -> ScoreResult:
    """Return the result of an item; without values if computing it would have exceeded ``max_compute``."""
    cached = sequence.num_cached or 0
    return ScoreResult(
        index=sequence.index,
        values=None if is_over_budget else tuple(sequence.values[position] for position in sequence.read_positions),
        computed_tokens=len(sequence.tokens) - cached,
        cached_tokens=cached,
    )


def _collect_remaining(sequence: GenerateSequence, text: str) -> Delta:
    """Return the text and the tokens that were not streamed yet."""
    sent = sequence.num_tokens_sent
    logprobs = None if sequence.logprobs is None else tuple(sequence.logprobs[sent:])
    start = len(sequence.branch.generated) + sent
    return Delta(sequence.index, text[sequence.num_chars_sent :], tuple(sequence.generated[start:]), logprobs)
