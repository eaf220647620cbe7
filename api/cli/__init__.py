"""The ``reasoner`` command: one module for each subcommand, and their common output."""
