"""Incremental detokenization and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.core.results import build_completion, take_delta
from engine.core.step import find_finish
from engine.protocol.types import Branch, InvalidRequest
from engine.scheduler.sequence import GenerateSequence
from engine.text.detokenizer import StopStrings, TextReader, decode_complete_text, num_chars_to_hold
from engine.text.tokenizer import Tokenizer
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate

TEXT = "step one: naïve 🐢🐣 café 안녕\n\nso \\boxed{42}"


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder, 400)


def test_decoding_inverts_encoding(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode(TEXT)) > 20


def test_chat_messages_are_rendered_with_the_generation_prompt(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "add 3"}])
    assert ids == tokenizer.encode("<|user|>add 3<|end|><|assistant|>")
    with pytest.raises(InvalidRequest, match="refused the messages"):
        tokenizer.encode_chat([{"content": "no role"}, 3])  # type: ignore[list-item]


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_a_reader_outputs_only_complete_characters_and_all_of_them(tokenizer: Tokenizer, step: int) -> None:
    tokens = tokenizer.encode(TEXT)
    grown: list[int] = []
    reader, shown = TextReader(tokenizer, grown), ""
    for start in range(0, len(tokens), step):
        grown.extend(tokens[start : start + step])
        reader.advance()
        assert reader.text.startswith(shown)
        assert TEXT.startswith(reader.text)
        shown = reader.text
    assert shown == TEXT == decode_complete_text(tokenizer, tokens)


def test_decoded_text_omits_an_incomplete_last_character(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ab🐢")
    assert decode_complete_text(tokenizer, tokens[:-1]) == "ab"


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
def test_the_longest_possible_prefix_of_a_stop_string_is_held_back(
    text: str, stops: tuple[str, ...], expected: int
) -> None:
    assert num_chars_to_hold(text, stops) == expected


def test_the_stop_string_that_ends_first_is_found_in_new_text_only(tokenizer: Tokenizer) -> None:
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
    assert StopStrings(tokenizer, ("\ufffd",)).may_end(tokenizer.encode("add")[0])


def test_tokens_whose_text_is_a_stop_string_are_listed(tokenizer: Tokenizer) -> None:
    first, *others = tokenizer.encode(TEXT)
    alone = tokenizer.decode([first])
    assert others
    assert StopStrings(tokenizer, (alone, TEXT)).tokens == {first}


STOPS = [("\n\n",), ("d{4",), ("🐣",), ("ï",), ("녕", "🐢🐣"), ("step",), ("o",), ("}",), (" 🐢",)]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("given", [0, 3, 11])
def test_a_branch_stops_with_the_token_that_completes_a_stop_string(
    folder: Path, stop: tuple[str, ...], given: int
) -> None:
    """The text is fed token by token, some of it as ``generated``; the reference searches the text of each prefix."""
    harness = Harness(folder)
    tokenizer = harness.core.model.tokenizer
    tokens = tokenizer.encode(TEXT)
    before = decode_complete_text(tokenizer, tokens[:given])
    texts = [decode_complete_text(tokenizer, tokens[:end]) for end in range(given + 1, len(tokens) + 1)]
    new = [text for text in texts if any(text.find(s, max(0, len(before) - len(s) + 1)) >= 0 for s in stop)]
    harness.submit(generate([5], [Branch(1, 1, 200, tuple(tokens[:given]))], stop=stop), stream=True)
    sequence = harness.core._requests[0].sequences[0]
    assert isinstance(sequence, GenerateSequence)
    streamed, stopped = "", None
    for token in tokens[given:]:
        sequence.generated.append(token)
        reason = find_finish(sequence, token, 256)
        if reason is not None:
            stopped = decode_complete_text(tokenizer, sequence.generated)
            assert reason[0] == "stop"
            assert reason[1] in stop
            break
        if delta := take_delta(sequence):
            streamed += delta.text
    assert stopped == (new[0] if new else None)
    assert not any(s in streamed for s in stop)
    assert (stopped or TEXT).startswith(before + streamed)


PIECES = ["a", "b", " ", "\n", "é", "你", "🐢", "ab", "\n\n", "\ufffd", "step"]
texts = st.lists(st.sampled_from(PIECES), max_size=20).map("".join)


def split(tokenizer: Tokenizer, raw: bytes, cuts: Sequence[int]) -> list[int]:
    """Return tokens of some bytes, cut at arbitrary places: valid pieces as text, others byte by byte."""
    alphabet, tokens = bytes_to_unicode(), []
    ends = [*sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    for start, end in zip([0, *ends], ends, strict=False):
        piece = raw[start:end]
        try:
            tokens += tokenizer.encode(piece.decode())
        except UnicodeDecodeError:
            tokens += [tokenizer._fast.token_to_id(alphabet[byte]) for byte in piece]
    return tokens


@given(texts, st.lists(st.integers(0, 200), max_size=30))
def test_text_is_read_by_complete_characters_however_its_bytes_are_split(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    tokens = split(tokenizer, text.encode(), cuts)
    grown: list[int] = []
    reader = TextReader(tokenizer, grown)
    for token in tokens:
        grown.append(token)
        reader.advance()
        assert text.startswith(reader.text)
    assert reader.final(len(tokens)) == decode_complete_text(tokenizer, tokens)


@given(
    st.lists(st.sampled_from([b"\x80", b"\xf0\x9f", b"\xe4", b"a", "🐢".encode()]), max_size=60).map(b"".join),
    st.lists(st.integers(0, 200), max_size=10),
    st.integers(1, 5),
)
def test_invalid_bytes_are_read_as_the_decoder_outputs_them(
    tokenizer: Tokenizer, raw: bytes, cuts: list[int], step: int
) -> None:
    tokens = split(tokenizer, raw, cuts)
    grown: list[int] = []
    reader, whole = TextReader(tokenizer, grown), tokenizer.decode(tokens)
    for start in range(0, len(tokens), step):
        grown.extend(tokens[start : start + step])
        reader.advance()
        assert whole.startswith(reader.text)
        assert reader.final(len(grown)) == decode_complete_text(tokenizer, grown)


def test_tokens_without_text_do_not_end_a_character(tokenizer: Tokenizer) -> None:
    [silent] = split(tokenizer, b"<|end|>", [])
    assert tokenizer.decode([silent]) == ""
    first, last = split(tokenizer, "é".encode(), [1])
    reader = TextReader(tokenizer, grown := split(tokenizer, b"\x80" * 8, []))
    for token in (first, silent, silent, last):
        grown.append(token)
        reader.advance()
    assert reader.text == tokenizer.decode(grown) == "\ufffd" * 8 + "é"


def test_a_character_before_an_incomplete_one_is_read_once_when_many_tokens_arrive_at_once(
    tokenizer: Tokenizer,
) -> None:
    pieces = {token: tokenizer.decode([token]) for token in range(360)}
    joined = next(token for token, piece in pieces.items() if piece[:1].isalpha() and piece.endswith("\ufffd"))
    tokens = [*tokenizer.encode("so the answer is")] * 3 + [joined]
    reader = TextReader(tokenizer, tokens)
    reader.advance()
    assert reader.text == reader.final(len(tokens)) == decode_complete_text(tokenizer, tokens)


def test_bytes_that_never_become_text_are_not_decoded_repeatedly(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = 0
    decode = tokenizer.decode

    def counting(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return decode(tokens)

    monkeypatch.setattr(tokenizer, "decode", counting)
    tokens = split(tokenizer, b"\x80\xf0\x9f" * 400, [])
    grown: list[int] = []
    reader = TextReader(tokenizer, grown)
    for token in tokens:
        grown.append(token)
        reader.advance()
    assert decoded < 150 * len(tokens)
    assert reader.text == ""
    grown.extend(tokenizer.encode("x"))
    reader.advance()
    assert reader.text == decode(grown)


@given(
    texts,
    st.lists(st.integers(0, 200), max_size=30),
    st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join), min_size=1, max_size=3),
    st.integers(0, 30),
)
def test_any_stop_string_ends_any_text_where_it_is_complete_and_is_never_streamed(
    folder: Path, harness: Harness, text: str, cuts: list[int], stops: list[str], given_tokens: int
) -> None:
    """The reference searches the text of each prefix of the tokens."""
    tokenizer = harness.core.model.tokenizer
    tokens = split(tokenizer, text.encode(), cuts)
    given_tokens = min(given_tokens, len(tokens))
    request = generate([5], [Branch(1, 1, 200, tuple(tokens[:given_tokens]))], stop=tuple(stops))
    harness.submit(request, stream=True)
    [sequence] = harness.core._requests[-1].sequences
    harness.core.cancel(lambda _: True)
    assert isinstance(sequence, GenerateSequence)
    before = decode_complete_text(tokenizer, tokens[:given_tokens])
    streamed, reason = "", None
    for token in tokens[given_tokens:]:
        sequence.generated.append(token)
        now = decode_complete_text(tokenizer, sequence.generated)
        ends = [now.find(stop, max(0, len(before) - len(stop) + 1)) + len(stop) for stop in stops]
        found = [end for end, stop in zip(ends, stops, strict=True) if end >= len(stop)]
        reason = find_finish(sequence, token, 256)
        assert (reason is not None) == bool(found)
        if reason is not None:
            assert now[: min(found)].endswith(str(reason[1]))
            assert len(before + streamed) <= min(found) - len(str(reason[1])) or len(before) > min(found) - len(
                str(reason[1])
            )
            break
        if delta := take_delta(sequence):
            streamed += delta.text
    rest, answer = build_completion(sequence, reason or ("length", None))
    assert streamed + (rest.text if rest else "") == answer.text
    assert before + answer.text == decode_complete_text(tokenizer, sequence.generated)


@pytest.fixture(scope="module")
def harness(folder: Path) -> Harness:
    return Harness(folder)
