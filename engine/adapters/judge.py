"""The tokens by which an adapter that was trained to judge is asked. Free of torch, so that verifiers import it.

Training writes them into the adapter's folder, the engine reports them in ``ModelInfo.extra``, and a verifier asks with
them behind a branch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.protocol.types import EngineError, ModelInfo

JUDGE_FILE = "reasoner_judge.json"
"""File in the adapter's folder."""
JUDGE_NOTE = "reasoner_judge"
"""Key in ``ModelInfo.extra``."""


@dataclass(frozen=True, slots=True)
class JudgeTokens:
    """The tokens of a verdict: those that ask for it, and its two labels."""

    invocation: tuple[int, ...]
    positive: int
    negative: int

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"invocation": list(self.invocation)}

    def save(self, folder: Path) -> None:
        (folder / JUDGE_FILE).write_text(json.dumps(self.to_json()) + "\n")


def load_judge(folder: Path) -> JudgeTokens | None:
    """Read the file in an adapter's folder; ``None`` without one. Raises ``EngineError`` for a damaged one."""
    path = folder / JUDGE_FILE
    if not path.exists():
        return None
    try:
        judge = json.loads(path.read_text(encoding="utf-8"))
        tokens = JudgeTokens(tuple(judge["invocation"]), judge["positive"], judge["negative"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{path} is not readable: {error!r}; train the adapter again, or remove the file") from None
    ids = [*tokens.invocation, tokens.positive, tokens.negative]
    if not tokens.invocation or not all(type(token) is int and token >= 0 for token in ids):
        raise EngineError(f"{path} must have the token ids invocation (a list), positive and negative")
    return tokens


def find_judge(info: ModelInfo) -> JudgeTokens | None:
    """Return the tokens by which a served model is asked; ``None`` if it is no adapter that was trained to judge."""
    note = info.extra.get(JUDGE_NOTE)
    if not isinstance(note, Mapping):
        return None
    return JudgeTokens(tuple(note["invocation"]), note["positive"], note["negative"])
