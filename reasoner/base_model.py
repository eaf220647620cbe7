"""Base classes of the models of the REST schema."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, field_validator


class StrictModel(BaseModel):
    """Rejects unknown fields: a silently ignored field could be a silently ignored budget."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _reject_boolean_numbers(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """Reject booleans as numbers: a budget of ``true`` tokens would be 1."""
        validated = validate(value)
        if isinstance(value, bool) and isinstance(validated, int | float) and not isinstance(validated, bool):
            raise ValueError("must be a number, not true or false")
        return validated

    def list_given(self) -> dict[str, Any]:
        """Return the fields that were given, with their values: a partial model is read here alone."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}


def read_type(value: Any) -> str:
    """Return ``type`` of a document or of its model, which tells the members of a union apart."""
    return str(value.get("type") if isinstance(value, dict) else getattr(value, "type", None))


class VerifierSpec(StrictModel):
    """Base of all kinds of verifiers."""

    kind: str

    scores_steps: ClassVar[bool] = False
    """True if it scores unfinished solutions."""
    compares: ClassVar[bool] = False
    """True if it compares two solutions, instead of scoring one unless ``also_scores``."""
    also_scores: ClassVar[bool] = False
    """True if one that compares scores single solutions, too."""
    is_billed_by_solution: ClassVar[bool] = False
    """True if each solution costs a question of about the same length, whatever it shares with others."""
    is_conclusive: ClassVar[bool] = False
    """True if a score of 1 is a fact, so that no answer can be better."""
    answer_language: ClassVar[str | None] = None
    """Language of the block of code that is the answer, unless the job says otherwise; ``None`` for any text."""

    @property
    def can_read_branches(self) -> bool:
        """True if it may be asked behind the branch itself, and then reads all of it, thoughts included."""
        return False

    @classmethod
    def can_score(cls) -> bool:
        """Return True if it scores single solutions."""
        return cls.also_scores or not cls.compares
