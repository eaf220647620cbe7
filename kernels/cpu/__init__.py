"""Kernels that numba compiles for the processor at hand, on the threads of torch's own pool.

The packages beside this one (``kernels.linear``, ``kernels.attention``, …) choose between these kernels, Triton's and
plain torch by the device and type of their tensors; import those, except for what only a CPU has, such as recorded
kernel graphs.
"""
