"""The faces that people and programs use: HTTP routes and the command line."""
