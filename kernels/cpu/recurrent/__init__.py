"""Compiled kernels of layers that keep a state: one pass over a step's tokens, sequence by sequence."""
