"""Formats of public process reward models: the encoding of a question and its steps, and the position of the score."""
