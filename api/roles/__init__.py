"""The processes of a service: single roles, all roles under a supervisor, and private services of a command."""
