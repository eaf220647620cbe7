"""Worker of the tests of ``reasoner.subprocess_pool``; each request names the action."""

from __future__ import annotations

import os
from typing import Any

from reasoner.subprocess_worker import serve

MEMORY_BYTES = 512 << 20
kept: list[bytes] = []


def handle(request: Any) -> Any:
    match request:
        case "pid":
            return os.getpid()
        case "hang":
            while True:
                pass
        case "die":
            os._exit(3)
        case "grow":
            kept.append(b"x" * (MEMORY_BYTES * 5 // 8))
        case "burst":
            kept.append(b"x" * (2 * MEMORY_BYTES))
        case "raise":
            raise KeyError
        case "print":
            print("this is not a reply")
    return os.getpid()


if __name__ == "__main__":
    serve(handle, MEMORY_BYTES)
