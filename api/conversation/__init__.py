"""A conversation that a client sends and waits for, whatever the format of its API: a job behind every answer.

``request``: the fields of a job that clients may give beside their format's own, and their conversion to a job.
``sent_fields``: names of these fields in errors. ``narration``: the text about a search, and what an answer needs of
its end. ``report``: the job behind an answer. ``calls``: calls of functions in answers. ``streaming``: connections of
clients that wait. ``failures``: problems of jobs without a result. ``error_format``: middleware that writes problem
documents in the format of a client's API. ``unsupported``: fields that are ignored, or refused by name. ``thoughts``:
thoughts in what a client sends back.
"""
