"""Matrix products with float32, 8-bit and 4-bit weights.

`fp32`, `int8` and `int4` are for the CPU (`fp32` also for a GPU) and pack their weights once. The others are functions
for a GPU, with a reference in torch.
"""
