"""Errors of loading a checkpoint, whose files may hold anything, as ``EngineError``."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.core.gpu_memory import NotEnoughMemory
from engine.protocol.types import EngineError


@contextmanager
def name_checkpoint(path: Path) -> Iterator[None]:
    """Raise ``EngineError`` that names the checkpoint for any exception while it is loaded.

    What is known to occur has an error of its own with what would be right; this is for all else.
    """
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason is given"
        if _is_lack_of_memory(error):
            raise NotEnoughMemory(
                f"{path}: there is not enough memory for the model and its kv_tokens and max_running: {reason}"
            ) from error
        if isinstance(error, OSError):
            raise EngineError(f"{path} cannot be read: {reason}") from error
        raise EngineError(
            f"{path} holds no checkpoint that can be loaded ({type(error).__name__}: {reason}): save it anew, or look "
            "for a value of the wrong kind in its JSON files"
        ) from error


def _is_lack_of_memory(error: Exception) -> bool:
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
    )
