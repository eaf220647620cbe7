"""Benchmarks of a user's own model: its speed beside other engines', and its fidelity to them."""
