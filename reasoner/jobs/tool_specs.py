"""The tools that a model may use while it reasons."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reasoner.base_model import StrictModel

PYTHON_INSTRUCTION = (
    "You may run Python: write it in a ```python block, and what it prints follows in an ```output block."
)


class PythonTool(StrictModel):
    """Python in the middle of a solution: a closed block of it runs, and its output is the solution's next text."""

    type: Literal["python"]
    calls: Annotated[int, Field(ge=1, le=64)] = Field(
        8, description="Calls that one solution may make; one more ends it, with the reason 'tool'."
    )
    seconds: Annotated[float, Field(gt=0, le=300)] = Field(
        10.0,
        description="Time of one call, in which the solution's earlier blocks run again. One that takes longer ends "
        "its solution, with the reason 'tool'; so do the limits of memory and of output.",
    )
    memory_mb: Annotated[int, Field(ge=128, le=8192)] = 1024
    output_chars: Annotated[int, Field(ge=100, le=32_000)] = Field(
        4000,
        description="Longest output of one call; a longer one is shortened in its middle, and 64 times as much ends "
        "the solution.",
    )
    instruction: Annotated[str, Field(min_length=1, max_length=4000)] | None = Field(
        PYTHON_INSTRUCTION, description="Text that is added to the system message, or is one; null: none."
    )
