"""Tests in a process that compiles kernels.

Compiled kernels are cached in the environment, by a hash of the source and of the compiler.
"""

import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(sys.prefix, "triton-cache")))
