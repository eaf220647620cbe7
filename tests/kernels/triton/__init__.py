"""Tests of the Triton kernels on a machine without a GPU.

``interpreted``: the kernels run in Triton's interpreter and are compared with float64. ``compiled``: they are compiled
for a Hopper GPU and the machine code is inspected. Triton decides when it is imported whether to interpret, so each
folder has a process of its own: ``pytest tests/kernels/triton/interpreted``, or all of ``pytest``, which starts both
(``tests/kernels/test_triton.py``).
"""
