"""The child of ``reasoner.equivalence``: reads pairs of answers as JSON lines, writes true or false for each."""

from __future__ import annotations

import json
import logging
import sys


def main() -> None:
    from math_verify import parse, verify

    logging.disable()  # math-verify reports every answer that it cannot parse; that is not an event here
    print("true", flush=True)  # ready
    for line in sys.stdin:
        a, b = (parse(f"${text}$", parsing_timeout=None) for text in json.loads(line))
        print(json.dumps(bool(verify(a, b, timeout_seconds=None) or verify(b, a, timeout_seconds=None))), flush=True)


if __name__ == "__main__":
    main()
