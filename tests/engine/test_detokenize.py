"""Texts of growing token lists, and stop strings wherever they fall."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.detokenize import StopStrings, TextReader, held_back, text_of
from engine.outputs import ending, next_delta
from engine.tokenizer import Tokenizer
from engine.types import Branch, InvalidRequest
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate

TEXT = "step one: naïve 🐢🐣 café 안녕\n\nso \\boxed{42}"


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder, 400)


def test_encoding_and_decoding_is_the_identity(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode(TEXT)) > 20


def test_chat_messages_go_through_the_template_with_the_generation_prompt(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "add 3"}])
    assert ids == tokenizer.encode("<|user|>add 3<|end|><|assistant|>")
    with pytest.raises(InvalidRequest, match="refused the messages"):
        tokenizer.encode_chat([{"content": "no role"}, 3])  # type: ignore[list-item]


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_a_reader_never_shows_half_a_character_and_misses_nothing(tokenizer: Tokenizer, step: int) -> None:
    tokens = tokenizer.encode(TEXT)
    grown: list[int] = []
    reader, shown = TextReader(tokenizer, grown), ""
    for start in range(0, len(tokens), step):
        grown.extend(tokens[start : start + step])
        reader.advance()
        assert reader.text.startswith(shown)
        assert TEXT.startswith(reader.text)
        shown = reader.text
    assert shown == TEXT == text_of(tokenizer, tokens)


def test_text_of_a_cut_character_ends_before_it(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ab🐢")
    assert text_of(tokenizer, tokens[:-1]) == "ab"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("so\n", ("\n\n",), 1),
        ("so\n\n", ("\n\n",), 1),
        ("so", ("\n\n",), 0),
        ("a\\box", ("\\boxed{", "x"), 4),
        ("abab", ("ababab", "abx"), 4),
        ("", ("a",), 0),
        ("aaa", ("b",), 0),
    ],
)
def test_the_longest_possible_beginning_of_a_stop_string_is_held_back(
    text: str, stops: tuple[str, ...], expected: int
) -> None:
    assert held_back(text, stops) == expected


def test_the_stop_string_that_ends_first_is_found_and_only_in_what_is_new(tokenizer: Tokenizer) -> None:
    stops = StopStrings(tokenizer, ("cd", "bcde", "b"))
    assert stops.find("abcde", 0) == "b"
    assert stops.find("abcde", 2) == "cd"
    assert stops.find("abcde", 4) == "bcde"
    assert stops.find("abcde", 5) is None


def test_only_tokens_that_can_complete_a_stop_string_are_decoded(tokenizer: Tokenizer) -> None:
    stops = StopStrings(tokenizer, ("\n\n", "}"))
    assert not stops.may_end(tokenizer.encode("add")[0])
    assert all(stops.may_end(tokenizer.encode(text)[-1]) for text in ("\n", "}", "🐢"))
    assert StopStrings(tokenizer, (". ",)).may_end(tokenizer.encode("add")[0])


STOPS = [("\n\n",), ("d{4",), ("🐣",), ("ï",), ("녕", "🐢🐣"), ("step",), ("o",), ("}",), (" 🐢",)]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("given", [0, 3, 11])
def test_a_branch_stops_with_the_token_that_completes_a_stop_string(
    folder: Path, stop: tuple[str, ...], given: int
) -> None:
    """The text is fed token by token, some of it as ``generated``; the truth is a search in the text of each prefix."""
    harness = Harness(folder)
    tokenizer = harness.core.model.tokenizer
    tokens = tokenizer.encode(TEXT)
    before = text_of(tokenizer, tokens[:given])
    texts = [text_of(tokenizer, tokens[:end]) for end in range(given + 1, len(tokens) + 1)]
    new = [text for text in texts if any(text.find(s, max(0, len(before) - len(s) + 1)) >= 0 for s in stop)]
    harness.submit(generate([5], [Branch(1, 1, 200, tuple(tokens[:given]))], stop=stop), stream=True)
    sequence = harness.core._jobs[0].sequences[0]
    streamed, stopped = "", None
    for token in tokens[given:]:
        sequence.written.append(token)  # type: ignore[union-attr]
        reason = ending(sequence, token, 256)  # type: ignore[arg-type]
        if reason is not None:
            stopped = text_of(tokenizer, sequence.written)  # type: ignore[union-attr]
            assert reason[0] == "stop"
            assert reason[1] in stop
            break
        if delta := next_delta(sequence):  # type: ignore[arg-type]
            streamed += delta.text
    assert stopped == (new[0] if new else None)
    assert not any(s in streamed for s in stop)
    assert (stopped or TEXT).startswith(before + streamed)
