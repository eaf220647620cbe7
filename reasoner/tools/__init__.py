"""Tools of a model: Python that a branch runs while it reasons."""
