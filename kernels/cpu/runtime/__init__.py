"""The runtime of kernels: compilation and its cache, launches on torch's threads, recorded kernel graphs, memory."""
