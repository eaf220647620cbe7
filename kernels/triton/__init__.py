"""The kernels for CUDA, in Triton. Each is imported by the function of the same name one folder up, where that is given
CUDA tensors, so that nothing here is needed on other machines."""
