"""Data types and arithmetic that the kernels of all devices share: noise, rotary tables, attention tiles."""
