"""Calls that models write: of tools, which the search runs, and of the client's functions, which are answers."""
