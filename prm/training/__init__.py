"""Training of token-classification process reward models."""
