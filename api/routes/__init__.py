"""The routes of the service's own API: jobs, their export, batches, keys, the service itself, and its web pages."""
