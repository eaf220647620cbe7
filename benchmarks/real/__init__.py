"""A public model on reasoning-gym's tasks: ``sweep`` looks for tasks of the right difficulty, the rest measures."""
