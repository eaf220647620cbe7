"""Worker process of ``reasoner.answers.equivalence``: compares two answers with math-verify."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # traversing the imported modules, which stay alive, took a seventh of the start

import logging

from reasoner.answers.algebra import are_equal
from reasoner.subprocess_worker import serve


def main() -> None:
    gc.freeze()
    gc.enable()
    logging.disable()  # math-verify logs every answer that it cannot parse
    serve(lambda pair: are_equal(*pair))


if __name__ == "__main__":
    main()
