"""Clients' regular expressions: patterns refused before compilation, and the worker that compiles the others."""

from __future__ import annotations

import re
from typing import NoReturn

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from reasoner import regex as patterns
from reasoner import regex_worker
from reasoner.regex import (
    MAX_PARTS,
    LastMatch,
    check_pattern,
    count_parts,
    find_pattern_error,
    matches_fully,
    search_last,
)
from reasoner.subprocess_pool import keep_workers_alive
from tests.specs import build_spec


def part(text: str) -> tuple[str, int]:
    return text, 1


def repeated(inner: tuple[str, int], count: int, mark: str) -> tuple[str, int]:
    return f"(?:{inner[0]}){{{mark.format(count)}}}", max(1, count) * inner[1]


# Patterns with the number of parts that they have by construction. Each literal stands alone: an alternative of single
# characters is one set.
atoms = st.sampled_from(["a", "b", "\\d", "[x-z_]", ".", "\\{", "[{9}]"]).map(part)
sized = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds(repeated, inner, st.integers(0, 40), st.sampled_from(["{}", "0,{}", "{},"])),
        st.lists(inner, min_size=1, max_size=4).map(
            lambda found: ("".join(text for text, _ in found), sum(size for _, size in found))
        ),
        inner.map(lambda found: (f"({found[0]})", 1 + found[1])),
        inner.map(lambda found: (f"(?={found[0]})", 1 + found[1])),
        st.tuples(inner, inner).map(lambda both: (f"(?:1{both[0][0]}|2{both[1][0]})", 3 + both[0][1] + both[1][1])),
    ),
    max_leaves=12,
)


@given(sized)
def test_the_parts_of_a_pattern_are_counted_exactly_and_accepted_patterns_compile(
    built: tuple[str, int],
) -> None:
    pattern, size = built
    assert count_parts(re._parser.parse(pattern)) == size  # type: ignore[attr-defined]
    if len(pattern) > 1000 or size > MAX_PARTS:
        with pytest.raises(ValueError, match=r"multiply to more than|at most 1000"):
            check_pattern(pattern)
        return
    assert check_pattern(pattern) == pattern
    assert regex_worker.handle(["error", pattern]) == ""


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-z]{5000}-{5000}", r"(?:\d{4}-){1000}", "^.{1,10000}$", r"(\w+\s){0,2000}", "(?x)a{2} # {999}{999}\n b{9}",
        "[{99}{99}{99}]{99}", "a*+b?+(?>c)", "(?P<x>a)(?(x)b|c)", r"(a)\1{99}", "",
    ],
)  # fmt: skip
def test_long_repetitions_of_small_parts_are_accepted(pattern: str) -> None:
    assert check_pattern(pattern) == pattern
    assert regex_worker.handle(["error", pattern]) == ""


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", "(?<n>a)", "[b-a]", "(?:" * 400, "a{99999999999}", r"\1", "(?P<n"])
def test_invalid_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"not a regular expression|at most"):
        check_pattern(pattern)


def test_a_job_is_validated_without_compiling_its_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    build_spec(
        {"problem": "?", "verifier": {"kind": "json_schema", "json_schema": {}}}
    )  # imports what the first validation needs

    def compiled(*_: object) -> NoReturn:
        raise AssertionError("compiled")

    monkeypatch.setattr(re._compiler, "compile", compiled)  # type: ignore[attr-defined]
    monkeypatch.setattr(regex, "compile", compiled)
    for name, more in (
        ("1", {"verifier": {"kind": "regex", "pattern": "never seen before [1]"}}),
        ("2", {"answer": {"extract": {"regex": "never (seen) before [2]"}}}),
        ("3", {"verifier": {"kind": "json_schema", "json_schema": {"pattern": "never seen before [3]"}}}),
    ):
        build_spec({"problem": name, **more})
    with pytest.raises(AssertionError):  # checks that the trap works
        re.compile("never seen before [4]")


async def test_the_worker_compiles_matches_and_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    with keep_workers_alive():
        assert await find_pattern_error("a+b?") == ""
        assert await find_pattern_error("(") == "not a regular expression: missing ) at position 1"
        assert [await matches_fully("a+b?", text) for text in ("aab", "b", "aabc", "xaab")] == [
            True,
            False,
            False,
            False,
        ]
        assert await search_last("<(.)>", "<1><2> ") == LastMatch("2", 6)
        assert await search_last("<(.)?>", "<>") == LastMatch(None, 2)
        assert await search_last("<(.)>", "") == LastMatch(None, None)
        monkeypatch.setattr(patterns, "CPU_SECONDS", 0.1)
        assert await search_last("(x+x+)+y", "x" * 5000) is None
        assert not await matches_fully("(x+x+)+y", "x" * 5000)
