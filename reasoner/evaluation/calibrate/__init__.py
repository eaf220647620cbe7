"""Measurement and fitting of the ``auto`` strategy's calibration; ``calibrate`` is the entry point."""
