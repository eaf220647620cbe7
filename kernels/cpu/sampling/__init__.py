"""Sampling, and the operators of drafters beside their models, on the CPU."""
