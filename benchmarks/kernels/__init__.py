"""The speed of single kernels on a GPU beside torch's own: ``python -m benchmarks.kernels``."""
