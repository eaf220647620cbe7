"""HTTP code that all routes share.

Middleware that authenticates a request, limits its rate and size, logs it and counts it; parsing of bodies, uploads and
query parameters; problem documents for every error; paging; the models that the engines serve; and the submission of
jobs and batches. Nothing here depends on a particular route.
"""
