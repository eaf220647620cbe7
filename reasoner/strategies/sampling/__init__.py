"""Strategies that sample whole solutions, in parallel or in chains, and select one of them."""
