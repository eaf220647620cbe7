"""Checkpoint weights: reading them and multiplying with them.

``safetensors`` reads a checkpoint's tensors, ``formats`` the public formats of quantised checkpoints, ``matrix`` holds
the resulting weight matrices, and ``matmul`` turns these into products for the CPU or (``gpu_matmul``) the GPU. Import
from the modules.
"""
