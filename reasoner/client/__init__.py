"""Python client of a running service: ``Client`` for plain code and ``AsyncClient`` for asyncio, over HTTP.

    from reasoner.client import Client

    with Client("http://127.0.0.1:8000") as client:
        job = client.submit({"problem": "Use the numbers 3, 5, 7 to make 26.", "budget": {"tokens": 4000}})
        print(client.wait(job.id).result.answer)

Both have the same methods. Jobs, events and batches are the models of ``reasoner.jobs``; everything else is JSON as the
API documents it at ``/docs``. Every failure is a ``ServiceError``.
"""

from reasoner.client._async_client import AsyncClient
from reasoner.client._client import Client
from reasoner.client._errors import ServiceError

__all__ = ["AsyncClient", "Client", "ServiceError"]
