"""What quantisation costs in quality, on the bundled model."""
