"""Steps in which every branch computes its last token and samples the next one, as most steps of a search do.

Such steps follow each other with the same branches. What does not change from one to the next is made once.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from engine.cache.page_table import PageTable
from engine.runner.batch import DecodeRows, ScheduledSequence, sort_by_shape
from engine.runner.sample_step import SamplePlan, SampleRequest
from engine.scheduler.draft import EMPTY_DRAFT
from engine.scheduler.sequence import GenerateSequence, Sequence


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Branches of a step that only decodes without drafts.

    It holds as long as every step schedules these branches again and none has left its page table: they advance
    together, which keeps their order.
    """

    entries: abc.Sequence[tuple[Sequence, int]]
    """The branches as they were scheduled."""
    scheduled: list[ScheduledSequence]
    """The branches in the order of the batch."""
    tables: list[PageTable | None]
    """Page tables of ``entries``."""
    rows: DecodeRows
    samples: SamplePlan


def find_decode_batch(entries: abc.Sequence[tuple[Sequence, int]], previous: DecodeBatch | None) -> DecodeBatch | None:
    """Return the batch of scheduled sequences and their numbers of tokens; ``None`` if they do more than decode.

    ``previous``: that of the step before this one, if there was one.
    """
    tables = [sequence.table for sequence, _ in entries]
    if previous is not None and previous.tables == tables and previous.entries == entries:
        return previous
    if not all(count == 1 and _only_decodes(sequence) for sequence, count in entries):
        return None
    scheduled = sort_by_shape([ScheduledSequence(sequence, 1) for sequence, _ in entries])
    sequences = [sequence for sequence, *_ in scheduled if isinstance(sequence, GenerateSequence)]
    requests = [SampleRequest(sequence, EMPTY_DRAFT, row) for row, sequence in enumerate(sequences)]
    return DecodeBatch(entries, scheduled, tables=tables, rows=DecodeRows(sequences), samples=SamplePlan(requests))


def _only_decodes(sequence: Sequence) -> bool:
    """Return True if nothing but the next token follows from the sequence's next computed token."""
    return (
        isinstance(sequence, GenerateSequence)
        and sequence.num_computed + 1 == len(sequence.tokens)
        and sequence.num_computed >= sequence.num_prefix_tokens
    )
