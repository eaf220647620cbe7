"""From what an operator writes to a drafter that fits the model it is for."""

from __future__ import annotations

from pathlib import Path

from engine.models.config import read_json
from engine.models.interface import Model
from engine.models.load import load_model
from engine.protocol.types import EngineError
from engine.speculation.drafter import Drafter
from engine.speculation.drafters.draft_model import DraftModel
from engine.speculation.drafters.eagle import EagleDrafter, load_eagle
from engine.speculation.drafters.medusa import load_medusa
from engine.speculation.drafters.ngram import NgramDrafter

MAX_LENGTH = 16
"""Most guesses after each other. Even where nine of ten are right, more would not be met once in six tries."""

MAX_NODES = 24
"""Most guesses for one branch in a step. Trees are worth it for a few branches at a time, and they are attended to in
masked groups, which are for short rows."""

SHIPPED = "drafter"
"""Folder inside a checkpoint's with the drafter that is fastest for it, or with a ``config.json`` whose ``folder`` says
where that is, relative to it: a smaller model of its family."""

FORMS = "auto, off, ngram, draft_model=FOLDER, medusa=FOLDER, eagle=FOLDER"


def load_drafter(wanted: str, folder: Path, model: Model, *, context: int) -> Drafter | None:
    """The drafter that is wanted for the model in ``folder``; ``None`` for none.

    ``wanted``: one of ``FORMS``. ``auto`` is what lies in the checkpoint's folder ``drafter``, else n-grams.
    ``context``: most tokens of a sequence of the target. Raises ``EngineError`` when there is no such drafter, or it
    does not fit, with the two numbers that disagree.
    """
    kind, where = _resolved(wanted, folder)
    if kind == "off" and not where:
        return None
    if kind == "ngram" and not where:
        return NgramDrafter()
    if kind == "medusa" and where:
        return load_medusa(Path(where), model)
    if kind == "eagle" and where:
        return load_eagle(Path(where), model)
    if kind == "draft_model" and where:
        return _load_draft_model(Path(where), model, context)
    found = f" of kind {kind!r}, which {where} says it is" if wanted == "auto" else f" {wanted!r}"
    raise EngineError(f"there is no drafter{found}; what there is: {FORMS}")


def extra_layers(wanted: str, folder: Path) -> int:
    """Layers of keys and values that the drafter which ``load_drafter`` gives keeps in the target's pages."""
    kind, where = _resolved(wanted, folder)
    return EagleDrafter.layers if kind == "eagle" and where else 0


def check_length(length: int) -> None:
    """Raises ``EngineError`` for a draft length that is never asked for."""
    if not 1 <= length <= MAX_LENGTH:
        raise EngineError(f"a draft length of {length} is not between 1 and {MAX_LENGTH}")


def _resolved(wanted: str, folder: Path) -> tuple[str, str]:
    """The kind of the drafter that is wanted for the model in ``folder``, and where it lies."""
    kind, _, where = wanted.partition("=")
    if kind != "auto" or where:
        return kind, where
    shipped = folder / SHIPPED
    if not shipped.is_dir():
        return "ngram", ""
    # Heads say what they are, anything else is a model.
    about = read_json(shipped / "config.json")
    return str(about.get("kind", "draft_model")), str(shipped / str(about.get("folder", "")))


def _load_draft_model(folder: Path, target: Model, context: int) -> DraftModel:
    draft = load_model(folder, lambda config: min(config.max_context, context), target.device_config)
    if draft.config.num_labels:
        raise EngineError(f"{folder} is a classifier; a draft model must generate")
    ours, theirs = draft.config.vocab_size, target.config.vocab_size
    if ours != theirs:
        raise EngineError(f"{folder}: the draft model's vocab_size is {ours}, but the target model's is {theirs}")
    return DraftModel(draft, context=min(draft.config.max_context, context))
