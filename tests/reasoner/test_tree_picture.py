"""Pictures of large trees are summaries of a bounded size."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from reasoner.tree_picture import MAX_LEAVES, draw_tree, summarize


def make_node(name: str, score: float | None = None, state: str = "answer") -> dict[str, Any]:
    return {"id": name, "parent": name.rpartition(".")[0], "score": score, "state": state, "text": f"text of {name}"}


def read_size(picture: Path) -> tuple[int, int]:
    """Return width and height by the header of the PNG."""
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    return int(width), int(height)


FLAT = [make_node(str(index), index / 64, "pruned" if index % 4 == 0 else "answer") for index in range(64)]
DEEP = [make_node(".".join(["0"] * depth), 0.5) for depth in range(1, 61)]
BUSHY = [
    make_node(f"{a}.{b}.{c}"[: 2 * depth - 1], 0.3) for depth in (1, 2, 3) for a in range(9) for b in range(9)
    for c in range(9) if (depth > 2 or c == 0) and (depth > 1 or b == 0)
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "best"), [(FLAT, "3"), (DEEP, DEEP[-1]["id"]), (BUSHY, "7.8.2"), ([], None)])
def test_a_picture_is_bounded_whatever_the_tree(nodes: list[dict[str, Any]], best: str | None, tmp_path: Path) -> None:
    draw_tree(nodes, best, "title", tmp_path / "tree.png")
    width, height = read_size(tmp_path / "tree.png")
    assert height <= 1200
    assert width <= 3600


def test_flat_samples_become_the_chosen_one_the_best_and_one_node_for_the_others() -> None:
    drawn = summarize(FLAT, "3")
    assert len(drawn) <= MAX_LEAVES
    names = [node["id"] for node in drawn]
    assert names[0] == "3"
    assert "63" in names
    [rest] = [node for node in drawn if node["state"] == "summary"]
    left_out = {node["id"] for node in FLAT} - set(names)
    assert rest["text"].startswith(f"… {len(left_out)} more, scores 0.00 to ")
    assert rest["text"].endswith(", 16 pruned")


def test_the_chosen_path_of_a_bushy_tree_is_kept_and_every_node_has_its_parent() -> None:
    drawn = summarize(BUSHY, "7.8.2")
    names = {node["id"] for node in drawn}
    assert {"7", "7.8", "7.8.2"} <= names
    assert all(node["parent"] in names | {""} for node in drawn)


def test_a_small_tree_is_drawn_as_it_is() -> None:
    assert summarize(FLAT[:20], "3") == FLAT[:20]
