"""The delimiters of a model's thoughts, where its tokenizer does not tell them."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from reasoner.base_model import StrictModel

Delimiter = Annotated[str, Field(min_length=1, max_length=100)]


class ThoughtSpec(StrictModel):
    """The delimiters between which a model writes its thoughts, for models whose own are not found."""

    open: Delimiter
    close: Delimiter
    forced: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        None,
        description="Text that closes a thought at its limit; it contains 'close'. Default: 'close' on its own line.",
    )

    @model_validator(mode="after")
    def _check_forced_text_closes(self) -> Self:
        if self.forced is not None and self.close not in self.forced:
            raise ValueError(f"'forced' must contain {self.close!r}, or the thought would stay open")
        return self
