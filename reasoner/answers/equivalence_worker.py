"""Worker process of ``reasoner.answers.equivalence``: decides if two answers are mathematically equal."""

from __future__ import annotations

import logging

from reasoner.answers.algebra import are_equal
from reasoner.subprocess_worker import serve


def main() -> None:
    logging.disable()  # math-verify reports every answer that it cannot parse; that is not an event here
    serve(lambda pair: are_equal(*pair))


if __name__ == "__main__":
    main()
