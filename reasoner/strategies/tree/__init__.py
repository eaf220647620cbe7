"""Strategies that search step by step, guided by a verifier of steps."""
