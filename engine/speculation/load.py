"""Create the drafter that an option selects for a model."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.attention.layer import HeadShape
from engine.cache.key_pool import check_head_dim
from engine.models.config import ModelConfig, read_json, read_raw_config
from engine.models.interface import Model
from engine.models.load import choose_decoder, load_model
from engine.protocol.types import EngineError
from engine.speculation.drafter import Drafter
from engine.speculation.drafters.dflash.config import KIND as DFLASH
from engine.speculation.drafters.dflash.config import is_dflash, read_dflash_config
from engine.speculation.drafters.dflash.head import load_dflash
from engine.speculation.drafters.draft_model import POOL_BYTES, DraftModel
from engine.speculation.drafters.eagle import load_eagle
from engine.speculation.drafters.eagle3.config import KIND as EAGLE3
from engine.speculation.drafters.eagle3.config import is_eagle3
from engine.speculation.drafters.eagle3.head import load_eagle3
from engine.speculation.drafters.medusa import load_medusa
from engine.speculation.drafters.mtp import KIND as MTP
from engine.speculation.drafters.mtp import load_mtp
from engine.speculation.drafters.ngram import NgramDrafter

MAX_LENGTH = 16
"""Maximum depth of a draft: even if nine of ten tokens are accepted, a deeper one is in less than one of six cases."""

MAX_NODES = 24
"""Maximum number of draft tokens of one branch. Trees save time at small batch sizes only, and their attention is
computed in masked groups, which are meant for short rows."""

SHIPPED = "drafter"
"""Folder of the fastest drafter inside a checkpoint's folder, or of a ``config.json`` whose ``folder`` is the relative
path of a smaller model of its family."""

FORMS = "auto, off, ngram, mtp, draft_model=FOLDER, medusa=FOLDER, eagle=FOLDER, eagle3=FOLDER, dflash=FOLDER"


def load_drafter(wanted: str, folder: Path, model: Model, *, context: int) -> Drafter | None:
    """Load a drafter for the model in ``folder``; ``None`` for none.

    ``wanted``: one of ``FORMS``. ``auto`` is the checkpoint's own drafter (``SHIPPED``), else n-grams. ``context``:
    maximum number of tokens of a sequence. Raises ``EngineError`` if there is no such drafter or it does not fit the
    model, with the two numbers that differ.
    """
    kind, where = _resolve_kind(wanted, folder)
    if kind == "off" and not where:
        return None
    if kind == "ngram" and not where:
        return NgramDrafter()
    if kind == MTP and not where:
        return load_mtp(folder, model)
    if kind == "medusa" and where:
        return load_medusa(Path(where), model)
    if kind in ("eagle", EAGLE3) and where:
        _check_pages(Path(where), model)
    if kind == "eagle" and where:
        if is_eagle3(read_json(Path(where) / "config.json")):
            raise EngineError(f"{where} is an EAGLE-3 head; use {EAGLE3}={where}")
        return load_eagle(Path(where), model)
    if kind == EAGLE3 and where:
        return load_eagle3(Path(where), model)
    if kind == DFLASH and where:
        return load_dflash(Path(where), model)
    if kind == "draft_model" and where:
        return _load_draft_model(Path(where), model, context)
    found = f" of kind {kind!r}, which {where} says it is" if wanted == "auto" else f" {wanted!r}"
    raise EngineError(f"there is no drafter{found}; use one of: {FORMS}")


def _check_pages(folder: Path, target: Model) -> None:
    """Raise ``EngineError`` for a head whose keys and values cannot lie in the target's pages, beside its own."""
    shapes = set(target.config.head_shapes)
    if len(shapes) > 1 or not all(shape.has_values for shape in shapes):
        raise EngineError(
            f"{folder} is an EAGLE head, which needs a target whose layers all have keys and values of one size; "
            "choose ngram, medusa=FOLDER, dflash=FOLDER or draft_model=FOLDER"
        )


def list_key_shapes(wanted: str, folder: Path, target: ModelConfig) -> list[HeadShape]:
    """Return the shapes of the layers that the drafter keeps in the pages of a target, see ``Drafter.key_shapes``."""
    kind, where = _resolve_kind(wanted, folder)
    if kind == DFLASH and where:
        return list(read_dflash_config(Path(where), target).key_shapes)
    has_layer = kind == MTP or (kind in ("eagle", EAGLE3) and where)
    return [target.first_attention.shape] if has_layer else []


def check_kv_dtype(wanted: str, folder: Path, dtype: torch.dtype) -> None:
    """Raise ``EngineError`` if a draft model's keys and values cannot be stored in ``dtype``, before it is loaded."""
    kind, where = _resolve_kind(wanted, folder)
    if kind != "draft_model" or not where:
        return
    config = choose_decoder(read_raw_config(Path(where)))
    if isinstance(config, str):
        return  # transformers reads the sizes of such a model as it loads it
    try:
        check_head_dim(config.head_dim, dtype)
    except EngineError as error:
        raise EngineError(f"{where}, the draft model: {error}") from None


def max_own_bytes(drafter: Drafter | None) -> int:
    """Return the size of the keys and values that a drafter may keep in memory of its own."""
    return POOL_BYTES if isinstance(drafter, DraftModel) else 0


def check_length(length: int) -> None:
    """Raise ``EngineError`` unless ``length`` is a valid draft length."""
    if not 1 <= length <= MAX_LENGTH:
        raise EngineError(f"a draft length of {length} is not between 1 and {MAX_LENGTH}")


def _resolve_kind(wanted: str, folder: Path) -> tuple[str, str]:
    """Return the kind of the drafter and its folder, which is empty for drafters without files."""
    kind, _, where = wanted.partition("=")
    if kind != "auto" or where:
        return kind, where
    shipped = folder / SHIPPED
    if not shipped.is_dir():
        return "ngram", ""
    # Configurations of our own draft heads have a kind; all others are those of published heads and of models.
    config = read_json(shipped / "config.json")
    if is_eagle3(config):
        return EAGLE3, str(shipped)
    if is_dflash(config):
        return DFLASH, str(shipped)
    return str(config.get("kind", "draft_model")), str(shipped / str(config.get("folder", "")))


def _load_draft_model(folder: Path, target: Model, context: int) -> DraftModel:
    draft = load_model(folder, lambda config: min(config.max_context, context), target.device_config)
    if draft.config.num_labels:
        raise EngineError(f"{folder} is a classifier; a draft model must generate")
    if draft.config.states:
        raise EngineError(f"{folder} has recurrent layers; choose a draft model whose layers all have attention")
    ours, theirs = draft.config.vocab_size, target.config.vocab_size
    if ours != theirs:
        raise EngineError(f"{folder}: the draft model's vocab_size is {ours}, but the target model's is {theirs}")
    return DraftModel(draft, context=min(draft.config.max_context, context))
