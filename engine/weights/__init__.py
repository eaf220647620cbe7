"""Checkpoint weights: reading them and multiplying with them.

``safetensors`` reads a checkpoint's tensors and ``formats`` the public formats of quantised checkpoints. ``matrices``
has the layouts of the resulting weights, behind the interface in ``matrix``, and ``matmul`` turns them into products
for a CPU or a GPU. Import from the modules.
"""
