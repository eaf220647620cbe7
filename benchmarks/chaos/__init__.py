"""Run jobs while processes of every role are killed, ended and frozen at random, and count what became of them."""
