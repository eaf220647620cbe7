"""Specification of answer extraction and comparison. These models are part of the REST schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from reasoner.base_model import StrictModel
from reasoner.regex import check_pattern

Compare = Literal["math", "text", "choice", "code", "json"]


class RegexExtract(StrictModel):
    """Extraction of a group of a pattern's last match."""

    regex: Annotated[str, AfterValidator(lambda pattern: check_pattern(pattern, groups=1))] = Field(
        description="A regular expression with one group, in Python's syntax."
    )


class CodeExtract(StrictModel):
    """Extraction of the last fenced block of one language."""

    code: Annotated[str, Field(pattern=r"^[\w+#.-]{1,32}$")] = Field(description="As written behind the fence.")


def _find_kind(value: Any) -> str:
    if isinstance(value, RegexExtract | CodeExtract):
        value = value.model_dump()
    return ("code" if "code" in value else "regex") if isinstance(value, dict) else "name"


Extract = Annotated[
    Annotated[Literal["auto", "boxed", "phrase", "hash", "choice", "code", "all"], Tag("name")]
    | Annotated[RegexExtract, Tag("regex")]
    | Annotated[CodeExtract, Tag("code")],
    Discriminator(_find_kind),
]


class AnswerSpec(StrictModel):
    """A bare word means ``{"compare": word}``."""

    compare: Compare = Field(
        "math",
        description="math: as mathematics; text: without its spaces, but for those between digits; choice: as one "
        "letter; code: line by line; json: as JSON values.",
    )
    extract: Extract = Field(
        "auto",
        description="boxed: \\boxed{…}; phrase: 'The answer is …', 'Final answer: …'; hash: '#### …'; choice: a letter "
        "A to J; code: the last fenced block; all: the whole finished solution after its thought; auto: what fits "
        "'compare', for json all, for math and text boxed, <answer>, hash, JSON's answer, phrase; for math what is "
        "tagged or called final behind a box comes before it. With auto, the last number (math) or letter (choice) is "
        "the answer of a finished solution that states none.",
    )
    instruct: bool = Field(
        True,
        description="Ask the model to state its answer so that it is found: where answers are compared, and without a "
        "system message and a prompt of the job or the model, the job's prompt ends with such an instruction.",
    )

    @model_validator(mode="before")
    @classmethod
    def _wrap_word(cls, value: Any) -> Any:
        return {"compare": value} if isinstance(value, str) else value
