"""Attention over the paged KV cache.

``layer`` defines the interface that models call, ``plan`` the description of a step that every backend prepares, and
``select`` chooses the CPU backend: compiled kernels (``cpu_numba``), or plain torch (``cpu_torch``) for heads that they
do not support. ``cuda_triton`` is the backend for GPUs. Import from the modules.
"""
