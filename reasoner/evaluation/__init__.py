"""Accuracy against compute: runs strategies on a suite and counts what each answer cost."""
