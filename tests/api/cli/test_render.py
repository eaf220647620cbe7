"""Text of models on a terminal: control characters and loops of a degenerate model are harmless."""

from __future__ import annotations

import pytest

from api.cli.console import describe_auc
from api.cli.jobs import _describe_settings
from api.cli.render import cut, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("spam " * 1000, "spam spam spam … [1000 times]"),
        ("a" * 5000 + " end", "aaa… [5000 times] end"),
        ("line\n" * 300, "line\nline\nline\n… [300 times]"),
        ("before " + "0, " * 200 + "after", "before 0, 0, 0,… [200 times] after"),
        ("\x00" * 500, "\N{REPLACEMENT CHARACTER}" * 3 + "… [500 times]"),
        ("\x1b[31mred\x07", "\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}"),
        ("-" * 80 + "\n", "-" * 80 + "\n"),
        ("3 + 4 = 7\n\ttab", "3 + 4 = 7\n\ttab"),
    ],
)
def test_degenerate_text_is_shortened_and_other_text_stays(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_a_long_text_keeps_its_ends() -> None:
    text = " ".join(map(str, range(5000)))
    shown = cut(text)
    assert len(shown) < 4200
    assert shown.startswith("0 1 2 3")
    assert shown.endswith("4998 4999")
    assert f"{len(text) - 4000:,} characters are left out: --json has all" in shown


@pytest.mark.parametrize(
    ("auc", "within", "said"),
    [
        (0.5, 0.5, "near 0.5"),
        (0.41, None, "near 0.5"),
        (None, None, "There is no AUC"),
        (0.8, 0.52, "Within a question"),
    ],
)
def test_an_auc_near_chance_is_commented_on(auc: float | None, within: float | None, said: str) -> None:
    assert said in (describe_auc(auc, within) or "")


def test_a_good_auc_needs_no_comment() -> None:
    assert describe_auc(0.83, 0.7) is None
    assert describe_auc(0.83, None) is None


def test_settings_of_a_model_have_no_python_in_them() -> None:
    defaults = {
        "sampling": {"temperature": 0.6, "top_p": 1.0, "top_k": 0, "min_p": None, "thinking_tokens": None},
        "system": None, "prompt": "{problem}", "stop": ["END", "\n"], "chat_template_kwargs": {"enable_thinking": True},
        "strategy": {"name": "auto"},
        "prices": {"prompt": 1.0, "cached": None, "generated": 2.5, "source": "table"},
    }  # fmt: skip
    assert _describe_settings(defaults) == (
        'temperature 0.6, prompt {problem}, stop ["END", "\\n"], chat_template_kwargs {"enable_thinking": true}, '
        "strategy auto, prices 1/2.5 (table)"
    )
