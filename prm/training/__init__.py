"""Training of token-classification process reward models: examples, batches, the loop and its checkpoints."""
