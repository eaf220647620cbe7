"""Generated text is what the tokenizer's own decoder adds to the text of the prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.protocol.constraint import Constraint
from engine.protocol.types import Branch, Completion, Delta, InvalidRequest
from engine.text.detokenizer import TextReader, decode_complete_text, find_incomplete_end
from engine.text.tokenizer import Tokenizer
from tests.engine.helpers import Harness, generate
from tests.engine.text import sentencepiece

KINDS = ["llama", "gemma", "metaspace"]
PIECES = ["the", " ", "cat", " cat", ".", "A", "é", "你", "好", "🐢", "\n", "s.", "<|end|>", "  "]
pieces = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in made.items():
        sentencepiece.save(kind, folder)
    return made


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, tuple[Tokenizer, PreTrainedTokenizerFast]]:
    load = PreTrainedTokenizerFast.from_pretrained
    return {kind: (Tokenizer(folder, 400), load(folder)) for kind, folder in folders.items()}


def own_text(theirs: PreTrainedTokenizerFast, prompt: list[int], written: list[int]) -> str:
    """Return what the tokenizer's decoder adds to the prompt's text."""
    before = theirs.decode(prompt, skip_special_tokens=True)
    whole = theirs.decode([*prompt, *written], skip_special_tokens=True)
    assert whole.startswith(before)
    return str(whole[len(before) :])


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=pieces, text=pieces, step=st.integers(1, 4), cut=st.integers(0, 40))
def test_generated_text_is_what_the_decoder_adds_to_the_prompt(
    tokenizers: dict[str, tuple[Tokenizer, PreTrainedTokenizerFast]],
    kind: str,
    prompt: str,
    text: str,
    step: int,
    cut: int,
) -> None:
    ours, theirs = tokenizers[kind]
    tokens: list[int] = theirs("a" + prompt + text).input_ids
    cut = 2 + cut % (len(tokens) - 1)
    before, written = tokens[:cut], tokens[cut:]
    end = find_incomplete_end(ours, before)
    expected = own_text(theirs, before[: len(before) - len(end)], [*end, *written])
    grown: list[int] = []
    reader = TextReader(ours, grown, end)
    for start in range(0, len(written), step):
        grown.extend(written[start : start + step])
        reader.advance()
        assert expected.startswith(reader.text)
    assert reader.text == reader.final(len(written)) == expected
    assert TextReader(ours, written, end).final(len(written)) == expected
    assert decode_complete_text(ours, written, end) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_ends_inside_a_character_leaves_it_to_the_generated_text(
    tokenizers: dict[str, tuple[Tokenizer, PreTrainedTokenizerFast]], kind: str
) -> None:
    ours, theirs = tokenizers[kind]
    tokens = theirs("the 你好你好🐢").input_ids
    for cut in range(3, len(tokens)):
        end = find_incomplete_end(ours, tokens[:cut])
        prompt = theirs.decode(tokens[: cut - len(end)], skip_special_tokens=True)
        assert "\ufffd" not in prompt
        assert prompt + decode_complete_text(ours, tokens[cut:], end) == "the 你好你好🐢"
    assert find_incomplete_end(ours, theirs("a \ufffd").input_ids) == ()
    assert find_incomplete_end(ours, theirs("a").input_ids) == ()


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_bytes_at_the_end_of_a_prompt_are_no_generated_text(
    tokenizers: dict[str, tuple[Tokenizer, PreTrainedTokenizerFast]], kind: str
) -> None:
    ours, theirs = tokenizers[kind]
    [first, second, cat] = theirs.convert_tokens_to_ids(["<0xE4>", "<0xBD>", "▁cat"])
    end = find_incomplete_end(ours, [cat, first, second])
    assert end == (first, second)
    reader = TextReader(ours, written := [cat], end)
    reader.advance()
    assert reader.text == reader.final(1) == decode_complete_text(ours, written, end) == " cat"


@pytest.mark.parametrize("kind", KINDS)
def test_characters_before_one_that_the_limit_cuts_are_kept(
    tokenizers: dict[str, tuple[Tokenizer, PreTrainedTokenizerFast]], kind: str
) -> None:
    ours, theirs = tokenizers[kind]
    first, *rest = theirs("a你好").input_ids[1:]
    written = rest[-6:-1]
    assert decode_complete_text(ours, written) == "你"
    assert TextReader(ours, written).final(len(written)) == "你"
    reader = TextReader(ours, written)
    reader.advance()
    assert reader.text == "你"
    assert first != rest[0]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_within_generated_text_take_no_space_with_them(
    tokenizers: dict[str, tuple[Tokenizer, PreTrainedTokenizerFast]], kind: str
) -> None:
    ours, theirs = tokenizers[kind]
    cat, end = theirs.convert_tokens_to_ids(["▁cat", "<|end|>"])
    grown: list[int] = []
    reader = TextReader(ours, grown)
    for token in (cat, end, cat, end, end, end, cat):
        grown.append(token)
        reader.advance()
    assert reader.text == reader.final(7) == " cat cat cat"


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, folders: dict[str, Path]) -> tuple[Harness, Any]:
    folder = folders[request.param]
    return Harness(folder), PreTrainedTokenizerFast.from_pretrained(folder)


def force(harness: Harness, theirs: Any, tokens: list[int], **sampling: Any) -> tuple[str, Completion]:
    """Return the streamed text, and the last completion, of a branch made to write tokens after "the", in segments."""
    prompt = theirs("the").input_ids
    text = ""
    done: list[int] = []
    for token in tokens:
        law: dict[str, Any] = {"logit_bias": ((token, 100.0),), "temperature": 0.0, **sampling}
        events = harness.submit(generate(prompt, [Branch(1, 1, 1, tuple(done))], **law), stream=True)
        harness.run()
        streamed = "".join(event.text for event in events if isinstance(event, Delta))
        completion = events[-1]
        assert isinstance(completion, Completion)
        assert streamed == completion.text
        assert completion.token_ids == (token,)
        text += streamed
        done.append(token)
        if completion.finish_reason == "stop":
            break
    return text, completion


def test_segments_of_a_branch_join_to_the_decoders_text(served: tuple[Harness, Any]) -> None:
    harness, theirs = served
    for written in (" cat sat", "cat", " 你好", "\n the", " é.", "  a"):
        prompt = theirs("the").input_ids
        tokens = theirs("the" + written).input_ids[len(prompt) :]
        assert force(harness, theirs, tokens)[0] == own_text(theirs, prompt, tokens) == written


def test_a_stop_string_with_a_space_ends_a_branch_at_its_first_token(served: tuple[Harness, Any]) -> None:
    harness, theirs = served
    cat = theirs.convert_tokens_to_ids("▁cat")
    for stop in (" cat", " c", "cat", " "):
        _, completion = force(harness, theirs, [cat, cat], stop=(stop,))
        assert (completion.finish_reason, completion.stop) == ("stop", stop)
        _, completion = force(harness, theirs, [cat], stop=(stop,), include_stop_str_in_output=False)
        assert completion.text == " cat".split(stop, maxsplit=1)[0]


def test_a_constrained_text_is_the_choice_with_its_space(served: tuple[Harness, Any]) -> None:
    harness, theirs = served
    for text in (" cat", "cat", "  cat", "你", " é"):
        request = generate(theirs("the").input_ids, [Branch(1, key, 9) for key in range(3)], temperature=1.0)
        request = replace(request, constraint=Constraint("choice", f'["{text}"]'))
        assert [one.text for one in harness.complete(request)] == [text] * 3


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_is_a_special_token_ends_a_branch(
    served: tuple[Harness, Any], include: bool, stream: bool
) -> None:
    harness, theirs = served
    cat, end, eos = theirs.convert_tokens_to_ids(["▁cat", "<|end|>", "</s>"])
    prompt = theirs("the").input_ids
    for token, stop, ignore in ((end, "<|end|>", False), (eos, "</s>", True)):
        law: dict[str, Any] = {"logit_bias": ((token, 100.0),), "temperature": 0.0, "stop": ("xx", stop)}
        law |= {"include_stop_str_in_output": include, "ignore_eos": ignore}
        events = harness.submit(generate(prompt, [Branch(1, 1, 5, (cat,))], **law), stream=stream)
        harness.run()
        completion = events[-1]
        assert isinstance(completion, Completion)
        assert (completion.token_ids, completion.text) == ((token,), "")
        assert (completion.finish_reason, completion.stop) == ("stop", stop)


def test_a_stop_string_with_a_special_token_among_text_is_refused_with_the_remedy(served: tuple[Harness, Any]) -> None:
    harness, theirs = served
    with pytest.raises(InvalidRequest, match=r"special token '<\|end\|>'.*stop_token_ids") as refusal:
        harness.submit(generate(theirs("the").input_ids, [Branch(1, 1, 5)], stop=("<|end|>\n",)))
    assert refusal.value.field == "stop"
