"""One command for a machine with a GPU: correctness, the engine's decoding step, the kernels, and the cold start."""
