"""The speed of single GPU kernels compared with torch: ``python -m benchmarks.kernels``."""
