"""The routes of the service's own API: jobs, their export, batches in both formats, keys, usage, the service, pages."""
