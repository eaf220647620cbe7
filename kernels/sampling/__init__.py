"""Penalties and sampling on the device that has the logits."""
