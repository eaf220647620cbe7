"""One step of a model: build the batch, run the forward pass, sample from its hidden states.

``batch`` turns the scheduled sequences into flat tensors, ``forward`` runs the model on the CPU (from recorded kernels)
or on a GPU (from CUDA graphs), and ``sample_step`` samples tokens and computes scores and log-probabilities.
"""
