"""The archive: jobs that have ended, in SQL instead of Redis' memory.

``archive.Archive`` is the entry point; ``tables`` has the schema, ``migrations`` its history, ``migrate`` applies them,
``filters`` chooses jobs by what their requests say, ``search`` lists those that a filter wants, ``record`` is a job's
form in the archive, and ``errors`` says why it cannot be used. ``workers.broker.archiver`` moves the jobs.
"""
