"""A growing text releases only what can no longer change, and no part of a stop string."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spec_decode.llm.outputs import Completion
from spec_decode.llm.stop_strings import GrowingText


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def grown(data: bytes, stop: Sequence[str] = ()) -> tuple[list[str], GrowingText]:
    text, pieces = GrowingText(decode, stop), []
    for token in data:
        text.add([token])
        pieces.append(text.take())
    text.finish()
    return [*pieces, text.take(last=True)], text


@pytest.mark.parametrize(("least", "text"), [(0, "a"), (2, "a"), (3, "a--b"), (5, "a--b"), (9, "a--b--c--d")])
def test_stop_string_counts_only_after_min_tokens(least: int, text: str) -> None:
    for size in (1, 2, 3, 10):
        grown, data = GrowingText(decode, ["--"], min_tokens=least), b"a--b--c--d"
        for start in range(0, len(data), size):
            grown.add(data[start : start + size])
        grown.finish()
        assert grown.take(last=True) == grown.text == text


def test_completion_names_equivalent_of_vllm_outputs() -> None:
    completion: Any = Completion(
        prompt="a", text="b", token_ids=[98], finish_reason="length", num_prompt_tokens=1, accepted=[], logprobs=[]
    )
    with pytest.raises(
        AttributeError,
        match=r"no attribute 'outputs'. It is one text: leave .outputs\[0\] out, and read .text; with n, read .comp",
    ):
        completion.outputs[0].text  # noqa: B018
    with pytest.raises(AttributeError, match=r"^'Completion' object has no attribute 'txt'$"):
        completion.txt  # noqa: B018
    assert copy.deepcopy(completion) == pickle.loads(pickle.dumps(completion)) == completion


@given(st.text("abé€😀", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@example("aab", ["b", "ab"])
def test_pieces_form_text_up_to_first_stop_string(whole: str, stop: list[str]) -> None:
    pieces, text = grown(whole.encode(), stop)
    ends = [whole.find(each) + len(each) for each in stop if each in whole]
    first = whole[: min(ends)] if ends else whole
    cut = min((first.find(each) for each in stop if each in first), default=len(first))
    assert "".join(pieces) == text.text == first[:cut] and text.stopped == bool(ends)


def test_partial_character_completes_no_replacement_stop_string() -> None:
    pieces, text = grown("é\ufffdb".encode(), ["\ufffd"])
    assert "".join(pieces) == text.text == "é" and text.stopped


@given(st.binary(max_size=30), st.lists(st.integers(0, 30), max_size=4))
def test_tokens_added_together_give_same_text(data: bytes, cuts: list[int]) -> None:
    text = GrowingText(decode)
    for start, end in pairwise([0, *sorted(cuts), len(data)]):
        text.add(data[start:end])
    text.finish()
    assert text.take(last=True) == text.text == grown(data)[1].text


def test_stop_string_ends_in_token_with_partial_character() -> None:
    tokens = [b"a st", b"op\xe2", b"\x82\xac"]
    text = GrowingText(lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace"), ["stop"])
    for token, (settled, stopped) in enumerate([("a st", False), ("a ", True), ("a ", True)]):
        text.add([token])
        assert (text.text, text.stopped) == (settled, stopped)
    other = GrowingText(lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace"), ["other"])
    other.add([0, 1])
    assert other.text == "a stop"
    other.add([2])
    assert other.text == "a stop€"


@given(st.text("ab", max_size=20))
def test_emitted_piece_is_never_withdrawn(whole: str) -> None:
    pieces, text = grown(whole.encode(), ["abba", "bb"])
    assert text.text.startswith("".join(pieces[:-1]))


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_character_is_emitted_once_complete(character: str) -> None:
    pieces, _ = grown(f"a{character}b".encode())
    assert pieces[0] == "a" and "".join(pieces) == f"a{character}b" and "\ufffd" not in "".join(pieces)


def test_incomplete_final_character_is_replacement_sign() -> None:
    assert grown("a€".encode()[:-1])[1].text == "a\ufffd"


def test_possible_stop_string_is_kept_back() -> None:
    assert grown(b"xenough", ["end"])[0] == ["x", "", "", "eno", "u", "g", "h", ""]


def test_nothing_follows_a_stop_string() -> None:
    pieces, text = grown(b"one two three", [" two"])
    assert "".join(pieces) == text.text == "one" and text.stopped
