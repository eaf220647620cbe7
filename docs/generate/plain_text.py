"""Add each page of the built site as Markdown, and ``llms.txt``, an index of them for language models.

The index has the form of https://llmstxt.org: a title, a summary, and links with a sentence on each, by section.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def main() -> None:
    project = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    num_pages = write_plain_text(project, ROOT / project["docs_dir"], ROOT / project["site_dir"])
    print(f"wrote llms.txt and {num_pages} pages as Markdown")


def write_plain_text(project: dict[str, Any], sources: Path, site: Path) -> int:
    """Copy the staged pages beside the rendered ones and index those of the navigation; return how many there are."""
    pages = sorted(sources.rglob("*.md"))
    for page in pages:
        target = site / page.relative_to(sources)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, target)
    lines = [f"# {project['site_name']}", "", f"> {project['site_description']}"]
    alone = [item for item in project["nav"] if isinstance(_target(item), str)]
    sections = [("Start", alone), *((_title(item), _target(item)) for item in project["nav"] if item not in alone)]
    for title, items in sections:
        lines += ["", f"## {title}", "", *(_describe(item, sources) for item in items)]
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
    return len(pages)


def _title(item: dict[str, Any]) -> str:
    [title] = item
    return title


def _target(item: dict[str, Any]) -> Any:
    [target] = item.values()
    return target


def _describe(item: dict[str, str], sources: Path) -> str:
    summary = find_summary((sources / _target(item)).read_text())
    return f"- [{_title(item)}]({_target(item)})" + (f": {summary}" if summary else "")


def find_summary(page: str) -> str:
    """Return the first sentence of a page's first paragraph of prose, empty if there is none."""
    text = re.sub(r"^```.*?^```$|^<!--.*?-->$", "", page, flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        prose = " ".join(paragraph.split())
        if prose and not re.match(r"[#|!<>*:-]|\d+\.", prose):
            return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.split(r"(?<=[.]) ", prose)[0])
    return ""


if __name__ == "__main__":
    main()
