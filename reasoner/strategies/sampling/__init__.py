"""Strategies that sample whole solutions, in parallel or in chains, and choose among them."""
