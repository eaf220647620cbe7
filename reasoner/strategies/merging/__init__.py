"""Strategies that look at several finished solutions at once: they compare them, or write one from them."""
