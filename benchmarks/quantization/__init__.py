"""Quality loss of quantization, measured on the bundled model."""
