"""The kernels for CUDA, in Triton.

The public functions beside this package import them if they are given CUDA tensors, so that other machines need no
Triton.
"""
