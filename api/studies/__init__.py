"""Commands that study a service or prepare it: evaluation, calibration, training of verifiers, quantization, the demo.

They are above everything that serves, which imports none of them: ``api.cli.entry.app`` names them as texts.
"""
