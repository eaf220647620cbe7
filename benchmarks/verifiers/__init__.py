"""Verifiers that write and compare, beside the process reward model and the exact rule."""
