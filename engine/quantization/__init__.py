"""Make quantised checkpoints: round-to-nearest, GPTQ, AWQ, fp8 and NF4.

``quantize`` rewrites a checkpoint layer by layer, ``plan`` checks first that it can be done, ``calibration`` observes
the layers' inputs. ``python -m engine.quantization`` is the process that ``reasoner quantize`` starts. Import from the
modules.
"""
