"""Numerical building blocks of the engine: one function for all devices, and a plain torch reference of each.

Import them from `attention`, `linear`, `layers`, `sampling`, `ngrams` and `quantize`. These call the Triton kernels
(`triton`) for tensors on a GPU, and the kernels that numba compiles (`cpu`) for float32 tensors on the CPU. `common`
has the data types and the arithmetic that all devices share.
"""
