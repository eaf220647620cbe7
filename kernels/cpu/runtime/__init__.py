"""What kernels need to run: compilation and its cache, launches on torch's threads, recorded kernel graphs, memory."""
