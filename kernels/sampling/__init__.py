"""Penalties and sampling on the device that has the logits: Triton kernels on CUDA, their torch reference elsewhere."""
