"""The instruction that asks a model to state its answer where it is looked for."""

from __future__ import annotations

from reasoner.answers.spec import AnswerSpec, CodeExtract, RegexExtract

_BOXED = "Reason step by step, and put the final answer in \\boxed{}."
_INSTRUCTIONS = {
    "math": _BOXED,
    "text": _BOXED,
    "boxed": _BOXED,
    "choice": 'Reason step by step, and end with "The answer is (X)", where X is the letter of the right choice.',
    "phrase": 'Reason step by step, and end with "The answer is" and the final answer.',
    "hash": 'Reason step by step, and end with a line that holds only "####" and the final answer.',
    "code": "Write the final code in one fenced block, between lines of ```.",
    "json": "Answer in JSON alone.",
}
"""Instructions by ``compare`` for automatic extraction, and by the name of the extraction."""


def find_instruction(spec: AnswerSpec) -> str | None:
    """Return the instruction that fits the extraction; ``None`` for a pattern, for whole solutions, and if the job
    switches it off.
    """
    if not spec.instruct or isinstance(spec.extract, RegexExtract) or spec.extract == "all":
        return None
    if isinstance(spec.extract, CodeExtract):
        language = spec.extract.code
        return f"Write the final answer in one fenced block, between a line ```{language} and a line ```."
    return _INSTRUCTIONS[spec.compare if spec.extract == "auto" else spec.extract]
