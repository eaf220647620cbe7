"""Run jobs while processes of every role are killed, terminated and frozen at random, and audit the results."""
