"""Batches of files: each line of a file is a request to one endpoint, and its answer is a line of the results.

``lines`` reads and checks the lines, ``endpoints`` has what each endpoint makes of a body and of an ended job,
``results`` writes the files of results, and ``feeder`` runs in every API process and takes each batch through its
stages. ``message_batch`` shows a batch of messages in Anthropic's format.
"""
