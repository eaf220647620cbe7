"""Solutions and exact step labels of the bundled suites' problems; ``solutions`` is the entry point."""
