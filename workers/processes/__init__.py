"""Child processes and signals: starting and ending children, and orderly shutdown of this process."""
