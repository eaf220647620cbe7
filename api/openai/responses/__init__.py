"""Responses: body, response object, stream events, input items, and the routes of ``/v1/responses``."""
