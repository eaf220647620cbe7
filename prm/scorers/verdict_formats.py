"""Prompts that ask a language model for a verdict, the text before the verdict, and the labels behind it.

A format is named by the job, or written in the note ``reasoner_verifier`` of the model's config.json, or is the plain
one. The prompts are the files beside this module, in the folder ``prompts``.

Sources of the published formats: GenRM, Zhang et al. 2024, "Generative Verifiers: Reward Modeling as Next-Token
Prediction", section 3.2 and appendix A; ThinkPRM, Khalifa et al. 2025, "Process Reward Models That Think", appendix;
GenPRM, Zhao et al. 2025, "GenPRM: Scaling Test-Time Compute of Process Reward Models via Generative Reasoning",
section 3 (a judgement of one paragraph per request, and without running the code that it writes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from engine.protocol.types import EngineError, ModelInfo
from prm.scorers.templates import PromptTemplate, TemplateRefused

NOTE = "reasoner_verifier"
"""Key in a model's config.json: the fields of ``VerdictFormat``, and under ``pairwise`` those of comparisons."""
CHECK_VARIABLES = ("question", "solution", "steps", "step", "criterion")
COMPARE_VARIABLES = ("question", "first", "second", "criterion")
FormatName = Literal["plain", "genrm", "thinkprm", "genprm"]
Scale = Literal["yes_no", "1-5", "1-10", "A-T"]
MAX_LABELS = 20
"""Likeliest tokens whose probabilities every server reports."""


def _spread(labels: str | list[str]) -> dict[str, float]:
    """Return labels with values that rise evenly from 0 to 1."""
    return {label: index / (len(labels) - 1) for index, label in enumerate(labels)}


SCALES: Mapping[Scale, Mapping[str, float]] = {
    "yes_no": {"Yes": 1.0, "No": 0.0},
    "1-5": _spread("12345"),
    "1-10": _spread([str(number) for number in range(1, 11)]),
    "A-T": _spread("ABCDEFGHIJKLMNOPQRST"),
}
"""Labels with their scores. Of letters, A is the worst and T the best."""


@dataclass(frozen=True, slots=True)
class VerdictFormat:
    """A way to ask for a verdict.

    ``verdict`` is the text after which a label is due: the critique ends where the model writes its beginning, or at
    its limit, and the text is then appended. ``labels`` have scores from 0 to 1.
    """

    template: str
    verdict: str
    labels: Mapping[str, float]
    system: str | None = None
    stop: tuple[str, ...] = ()
    """Texts that end a critique and are left out of it; by default the verdict's own beginning."""

    @property
    def stops(self) -> tuple[str, ...]:
        return self.stop or (self.verdict.strip(),)


@cache
def read_prompt(name: str) -> str:
    """Return the text of a shipped prompt."""
    return (Path(__file__).parent / "prompts" / f"{name}.jinja").read_text()


_YES_NO = SCALES["yes_no"]
_SCALE_NOTES: Mapping[Scale, str] = {
    "yes_no": 'Then write "Verdict:" and one word: Yes if it is right, No if it is not.',
    "1-5": 'Then write "Verdict:" and one digit from 1 (wrong) to 5 (certainly right).',
    "1-10": 'Then write "Verdict:" and one number from 1 (wrong) to 10 (certainly right).',
    "A-T": 'Then write "Verdict:" and one letter from A (wrong) to T (certainly right).',
}


def open_check_format(name: FormatName | None, info: ModelInfo | None, scale: Scale | None = None) -> VerdictFormat:
    """Return the named format, by default that of the model's notes, or else the plain one.

    The plain format asks for a label of the ``scale``.
    """
    notes = {} if info is None else _read_notes(info)
    if name is None and info is not None and "template" in notes:
        return _from_notes(info, notes)
    match name:
        case "genrm":
            return VerdictFormat(read_prompt("genrm"), "Verification: Is the answer correct (Yes/No)? ", _YES_NO)
        case "thinkprm":
            closing = "\n</think>\n\nIs the solution correct? "
            return VerdictFormat(read_prompt("thinkprm"), closing, _YES_NO, stop=("</think>",))
        case "genprm":
            system = "You are a math teacher. Review and criticise the paragraphs of the solution step by step."
            closing = "<output>\n**Judgement**: $\\boxed{"
            return VerdictFormat(read_prompt("genprm"), closing, labels=_YES_NO, system=system, stop=("<output>",))
        case _:
            template = read_prompt("check").replace("[[scale]]", _SCALE_NOTES[scale or "yes_no"])
            return VerdictFormat(template, "\nVerdict: ", SCALES[scale or "yes_no"])


def open_compare_format(info: ModelInfo) -> VerdictFormat:
    """Return the format of comparisons in the model's notes, or else the plain one; its labels are of first, second."""
    pairwise = _read_notes(info).get("pairwise")
    if isinstance(pairwise, Mapping):
        return _from_notes(info, {**_read_notes(info), **pairwise})
    return VerdictFormat(read_prompt("compare"), "\nVerdict: ", {"A": 1.0, "B": 0.0})


def parse_check_template(source: str, *, has_criteria: bool) -> PromptTemplate:
    """Return a template that shows a question and a solution. Raises ``TemplateRefused``."""
    parsed = PromptTemplate(source, ("question", "criterion") if has_criteria else ("question",), CHECK_VARIABLES)
    if not parsed.variables & {"solution", "steps", "step"}:
        raise TemplateRefused(
            "the template does not use {{ solution }} (or {{ steps }}, {{ step }}): it needs one of them"
        )
    return parsed


def parse_compare_template(source: str, *, has_criteria: bool) -> PromptTemplate:
    """Return a template that shows a question and two solutions. Raises ``TemplateRefused``."""
    needed = ("question", "first", "second")
    return PromptTemplate(source, (*needed, "criterion") if has_criteria else needed, COMPARE_VARIABLES)


def with_changes(
    base: VerdictFormat, template: str | None, verdict: str | None, labels: Mapping[str, float] | None
) -> VerdictFormat:
    """Return the format with the parts that a job gives."""
    if verdict is not None:
        base = replace(base, verdict=verdict, stop=())
    return replace(base, template=template or base.template, labels=labels or base.labels)


def _read_notes(info: ModelInfo) -> dict[str, object]:
    notes = info.extra.get(NOTE)
    return dict(notes) if isinstance(notes, Mapping) else {}


def _from_notes(info: ModelInfo, notes: Mapping[str, object]) -> VerdictFormat:
    """Return the format that a model's config.json describes. Raises ``EngineError`` that names a fault."""
    template, verdict, labels, stop = (notes.get(key) for key in ("template", "verdict", "labels", "stop"))
    if not isinstance(template, str) or not isinstance(verdict, str) or not isinstance(labels, list):
        raise EngineError(
            f"model {info.id!r}: its {NOTE!r} in config.json needs 'template' and 'verdict' (texts) and 'labels' (a "
            "list of texts, the best first)"
        )
    values = {str(label): 1 - index / (len(labels) - 1) for index, label in enumerate(labels)}
    stops = tuple(map(str, stop)) if isinstance(stop, list) else ()
    return VerdictFormat(template, verdict, values, stop=stops)
