"""Availability of the compiled kernels: the processor's features, and the tensors that kernels accept."""

from __future__ import annotations

import ctypes
import sys
from platform import machine

import torch
from numba import config
from numba.core.codegen import get_host_cpu_features
from torch import Tensor

_HWCAP, _ASIMDDP = 16, 1 << 20
"""Index of the processor's features in a process's auxiliary vector (``getauxval(3)``), and the bit of ``sdot`` among
those of ARM (Linux, ``arch/arm64/include/uapi/asm/hwcap.h``)."""


def complete_features() -> str | None:
    """Return numba's setting ``CPU_FEATURES``, completed by ``dotprod`` for ARM processors under Linux.

    There LLVM reads few features, knows the others by the processor's name, and does not know the name of a newer one.
    A setting of numba's own stays as it is; ``None`` stands for the features that LLVM reads.
    """
    configured: str | None = config.CPU_FEATURES
    if configured is not None or config.CPU_NAME is not None or (sys.platform, machine()) != ("linux", "aarch64"):
        return configured
    if not ctypes.CDLL(None).getauxval(_HWCAP) & _ASIMDDP:
        return None
    features: str = get_host_cpu_features()
    return features + ",+dotprod"


def target_features() -> set[str]:
    """Return the processor features that numba compiles for, which numba's settings may narrow.

    A process that executes an instruction that its processor lacks is killed. If ``NUMBA_CPU_NAME`` names another
    processor, only the features that ``NUMBA_CPU_FEATURES`` adds are known to be there. Even for this processor they
    replace its own list, and LLVM knows some processors by the name of an older one without VNNI.
    """
    configured, features = complete_features(), set[str]()
    host = get_host_cpu_features() if configured is None or config.CPU_NAME is None else ""
    if configured is not None:
        host += ",-avxvnni,-avx512vnni"
    for names in (host, configured or ""):
        for name in filter(None, names.split(",")):
            features = features | {name[1:]} if name[0] == "+" else features - {name[1:]}
    # Without the foundation of AVX-512 the other parts of it cannot be used either.
    return features if "avx512f" in features else {name for name in features if not name.startswith("avx512")}


_FEATURES = target_features()
LANES = 16 if "avx512f" in _FEATURES else 8 if "avx2" in _FEATURES else 4
"""Float32 lanes of the widest vector register."""
HAS_INT8_DOT = {16: "avx512vnni", 8: "avxvnni"}.get(LANES) in _FEATURES
"""True if the widest registers have the VNNI instruction ``vpdpbusd``: sums of four products of bytes."""

HAS_SIGNED_DOT = "dotprod" in _FEATURES
"""True if ARM's registers have the instruction ``sdot``: sums of four products of signed bytes."""

HAS_BYTE_PRODUCTS = HAS_SIGNED_DOT or {"f16c", "fma", "avx512bw" if LANES == 16 else "avx2"} <= _FEATURES
"""True if the widest registers have products of bytes: one instruction with ``HAS_INT8_DOT`` or ``HAS_SIGNED_DOT``,
else two or more."""

HAS_FLOAT16 = "f16c" in _FEATURES or machine() in ("aarch64", "arm64")
"""True if an instruction widens float16 to float32."""


def can_use_kernels(*tensors: Tensor) -> bool:
    """Return True if the compiled kernels take these tensors: float32 on the CPU, and no gradient is recorded."""
    return all(
        tensor.device.type == "cpu" and tensor.dtype is torch.float32 and not tensor.requires_grad for tensor in tensors
    )
