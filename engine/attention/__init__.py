"""Attention over the paged KV cache.

``layer`` defines the interface that models call, ``plan`` the description of a step that every backend prepares, and
``select`` chooses the backend of a CPU: compiled kernels (``cpu_numba``), or plain torch (``cpu_torch``) for heads that
they do not support. On a GPU it is ``cuda_triton``. Import from the modules.
"""
