"""Requirements of the GPU path that are checked before weights are read: GPU, driver, Triton, compiler and folders.

Without the checks the first step would fail, after minutes of loading, with an error from the depths of Triton."""

from __future__ import annotations

import os
import re
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import NamedTuple

import torch

from engine.protocol.types import EngineError

_MIN_CAPABILITY = 8, 0
"""The first compute capability that Triton supports and that multiplies bfloat16: Ampere's."""
CPU_INSTEAD = "or compute on the CPU (--device cpu)"


class GpuFormat(NamedTuple):
    """A format of weights or of keys and values whose kernels need more than the least that the engine needs."""

    name: str
    capability: tuple[int, int]
    """The first compute capability with a kernel."""
    instead: str
    """The choice for a GPU that lacks it."""


FLOAT8_CAPABILITY = 8, 9
"""Ada, which has the instructions that convert 8-bit floats; those for integers convert other formats."""


def refuse_old_driver() -> None:
    """Raise ``EngineError`` if there is a GPU whose driver is too old for torch, which then reports no GPU at all.

    Without a GPU or its driver nothing is raised.
    """
    if torch.version.cuda is None or torch.cuda.is_available():
        return
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "too old" in str(error):
            raise EngineError(
                f"this machine's NVIDIA driver is too old for torch {torch.__version__}, which is built for CUDA "
                f"{torch.version.cuda}: update the driver, install a torch for an older CUDA, {CPU_INSTEAD}"
            ) from None


def check_gpu(device: torch.device) -> None:
    """Raise ``EngineError`` with what is missing, unless kernels can be compiled for this GPU and run on it."""
    capability = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)} (compute capability {_format_capability(capability)})"
    if capability < _MIN_CAPABILITY:
        raise EngineError(
            f"the engine needs compute capability {_format_capability(_MIN_CAPABILITY)}; this GPU is {name}"
        )
    if not has_code_for(capability, torch.cuda.get_arch_list()):
        raise EngineError(
            f"torch {torch.__version__} has no code for {name}, only for {', '.join(torch.cuda.get_arch_list())}: "
            f"install a torch built for this GPU, {CPU_INSTEAD}"
        )
    check_compiler()
    check_cache_folder(find_cache_folder(os.environ))


def check_format(gpu_format: GpuFormat, device: torch.device) -> None:
    """Raise ``EngineError`` unless this GPU has kernels for a format; other devices have theirs."""
    if device.type != "cuda":
        return
    has, needs = torch.cuda.get_device_capability(device), gpu_format.capability
    if has < needs:
        raise EngineError(
            f"{gpu_format.name}: needs a GPU of compute capability {_format_capability(needs)} or later; this one has "
            f"{_format_capability(has)}: {gpu_format.instead}"
        )


def has_code_for(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return True if one of torch's ``architectures``, such as ``sm_90`` and ``compute_90``, runs on a GPU.

    Machine code (``sm``) runs on later GPUs of the same major version; what the driver compiles (``compute``), on all
    later ones.
    """
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
        if match is None:
            continue
        built_for = int(match[2]), int(match[3])
        is_exact = built_for == capability
        is_earlier = built_for < capability and not match[4]
        if is_exact or (is_earlier and (match[1] == "compute" or built_for[0] == capability[0])):
            return True
    return False


def check_compiler() -> None:
    """Raise ``EngineError`` unless Triton, a C compiler and Python's headers are there, which compile each kernel."""
    if find_spec("triton") is None:
        raise EngineError(f"the GPU's kernels need Triton: pip install 'reasoner[gpu]', {CPU_INSTEAD}")
    chosen = os.environ.get("CC")
    if chosen is not None and which(chosen) is None:
        raise EngineError(f"Triton needs a C compiler, and CC is {chosen!r}, which is no program: correct or unset CC")
    if chosen is None and which("gcc") is None and which("clang") is None:
        raise EngineError(f"Triton needs a C compiler: install gcc or clang, set CC, {CPU_INSTEAD}")
    # Debian's own scheme of paths names a folder for local installations, where the headers are not.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if not header.exists():
        raise EngineError(f"Triton needs Python's headers, and {header} is missing: install python3-dev, {CPU_INSTEAD}")


def find_cache_folder(environment: os._Environ[str] | dict[str, str]) -> Path:
    """Return the folder in which Triton keeps compiled kernels."""
    if folder := environment.get("TRITON_CACHE_DIR"):
        return Path(folder)
    home = environment.get("TRITON_HOME")
    return (Path(home) if home else Path.home()) / ".triton" / "cache"


def check_cache_folder(folder: Path) -> None:
    """Raise ``EngineError`` unless files can be written to a folder and loaded from it as libraries."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise EngineError(
            f"Triton cannot write compiled kernels to {folder} ({error.strerror}): set TRITON_CACHE_DIR to a folder "
            "that is writable"
        ) from None
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise EngineError(
            f"{folder} is on a file system mounted noexec, from which no compiled kernel can be loaded: set "
            "TRITON_CACHE_DIR to a folder elsewhere"
        )


def _format_capability(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
