"""Attention over the paged KV cache.

``layer`` defines the interface that models call, ``plan`` the description of a step that every backend prepares, and
``select`` chooses the backend: on a CPU compiled kernels (``cpu_numba``), or plain torch (``cpu_torch``) for heads that
they do not support; on a GPU ``cuda_triton``, or ``cuda_flashinfer`` where FlashInfer is installed and was measured
(``flashinfer_times``). Import from the modules.
"""
