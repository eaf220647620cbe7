"""A batch with one shared budget beside the same budget split evenly, on the bundled model and both suites."""
