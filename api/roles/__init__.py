"""The processes of a service: each role alone, all of them under a supervisor, or private ones of a command."""
