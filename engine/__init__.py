"""The inference engine: paged prefix cache, scheduler, models, sampling, and its server and clients."""

import os

# Weights are read whole in every step. In pages of 2 MiB that is a fifth faster than in pages of 4 KiB; torch asks the
# kernel for them if this is set before its first tensor (it only matters to a process that imports torch after us).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
