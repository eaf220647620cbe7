"""The application: the list of all commands, and those that run the roles of a service."""
