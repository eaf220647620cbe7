"""Write the generated text of ``docs/`` in place, then the sources of the site to ``build/docs``."""

from __future__ import annotations

from docs.generate.committed import ROOT, find_stale
from docs.generate.stage import stage


def main() -> None:
    for path, text in find_stale().items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")
    stage()


if __name__ == "__main__":
    main()
