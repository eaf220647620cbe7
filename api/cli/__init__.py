"""The ``reasoner`` command: one module for each subcommand, and what they print by."""
