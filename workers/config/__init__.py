"""Settings of all roles, their types, limits by owner, and reloading while a process runs."""
