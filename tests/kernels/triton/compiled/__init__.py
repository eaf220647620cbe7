"""Tests whose process compiles. What is compiled is kept in the environment, so that a second run is quick: it is found
by a hash of the source and of the compiler."""

import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(sys.prefix, "triton-cache")))
