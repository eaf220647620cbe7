"""Tests whose process interprets; Triton asks when it sees a kernel, so this comes before everything else."""

import os

os.environ["TRITON_INTERPRET"] = "1"
