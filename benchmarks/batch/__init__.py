"""A batch with one shared budget compared with an even split of it, on the bundled model and both suites."""
