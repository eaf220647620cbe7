"""Rules by which a step of a solution ends. A step keeps the text that ends it, so that nothing is sampled twice.

The rules compile to stop strings and a length, which every server that continues a text understands. A stop string
does not see what follows it: "Wait" also ends a step at "Waiting".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from reasoner.base_model import StrictModel

MARKERS = ("Wait", "But wait", "Alternatively", "Hmm", "Let me check", "Let me verify", "Therefore", "So the answer")
"""Words with which thoughts of public models turn."""
DEFAULT_SEPARATOR = "\n\n"
MAX_STEP_TOKENS = 65_536

Length = Annotated[int, Field(ge=1, le=MAX_STEP_TOKENS)]


class StepRule(StrictModel):
    """Base of the rules."""

    min_tokens: Length | None = Field(None, description="Tokens before which nothing ends a step but its solution.")
    max_tokens: Length | None = Field(None, description="Tokens after which a step ends in any case.")

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, above max_tokens: give at most {self.max_tokens}")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end a step."""
        return ()

    @property
    def limit(self) -> int | None:
        """The number of tokens at which a step ends."""
        return self.max_tokens

    def is_single(self, text: str, tokens: int) -> bool:
        """Return True if a text of so many tokens is one step."""
        if self.limit is not None and tokens > self.limit:
            return False
        return not any(stop in text.strip() for stop in self.stops)


class SeparatorSteps(StepRule):
    """Steps that end with a text, by default an empty line."""

    by: Literal["separator"] = "separator"
    text: Annotated[str, Field(min_length=1, max_length=256)] = DEFAULT_SEPARATOR

    @property
    def stops(self) -> tuple[str, ...]:
        """The text, and where it ends lines, the same with carriage returns."""
        if "\n" not in self.text or "\r" in self.text:
            return (self.text,)
        return (self.text, self.text.replace("\n", "\r\n"))


class MarkerSteps(StepRule):
    """Steps that end with a turning word at the beginning of a line or sentence."""

    by: Literal["markers"]
    words: Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(min_length=1, max_length=20)] = (
        Field(default_factory=lambda: list(MARKERS))
    )

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(f"{before}{word}" for word in self.words for before in ("\n", ". "))


class TokenSteps(StepRule):
    """Steps of a fixed number of tokens."""

    by: Literal["tokens"]
    every: Length

    @property
    def limit(self) -> int | None:
        return self.every if self.max_tokens is None else min(self.every, self.max_tokens)


class SentenceSteps(StepRule):
    """Steps that end with a sentence: a full stop, question mark or exclamation mark before a space or line break."""

    by: Literal["sentence"]

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(mark + after for mark in ".?!" for after in " \n\r")


def get_step_rule(value: Any) -> str:
    """Return the tag of the member of ``Steps`` that ``value`` selects; without ``by`` a separator."""
    return str(value.get("by", "separator") if isinstance(value, dict) else getattr(value, "by", "separator"))


Steps = Annotated[
    Annotated[SeparatorSteps, Tag("separator")]
    | Annotated[MarkerSteps, Tag("markers")]
    | Annotated[TokenSteps, Tag("tokens")]
    | Annotated[SentenceSteps, Tag("sentence")],
    Discriminator(
        get_step_rule,
        custom_error_type="step_rule",
        custom_error_message="unknown rule of steps; 'by' is one of separator, markers, tokens, sentence",
    ),
]
DEFAULT_STEPS = SeparatorSteps()
