"""The corpus, its split and the prompts cut from it."""

from __future__ import annotations

import pytest

from spec_decode.models.text import BOS, corpus, decode, encode, held_out_prompts, paragraphs


@pytest.mark.parametrize("text", ["", "def f(x):\n    return x\n", "“naïve” → ≥ 1"])
def test_decode_inverts_encode(text: str) -> None:
    ids = encode(text)

    assert ids[0] == BOS
    assert BOS not in ids[1:]
    assert decode(ids) == text


def test_decode_drops_document_marks_and_replaces_torn_characters() -> None:
    assert decode([BOS, 97, BOS, 98, 0xE2, 0x80]) == "ab\ufffd"


def test_the_two_sides_share_no_paragraph_however_it_is_wrapped() -> None:
    train, held_out = ({words for text in side for words in paragraphs(text)} for side in corpus())

    assert len(held_out) > 50
    assert len(train) > 10 * len(held_out)
    assert not train & held_out


def test_training_text_holds_each_paragraph_once() -> None:
    found = [words for text in corpus().train for words in paragraphs(text)]

    assert len(found) == len(set(found))


def test_prompts_are_distinct_pieces_of_held_out_text_at_line_starts() -> None:
    documents = corpus().held_out
    prompts = held_out_prompts(60, 96)

    assert len(set(prompts)) == 60
    for prompt in prompts:
        assert len(prompt.encode()) == 96
        assert any("\n" + prompt in "\n" + text for text in documents)


def test_prompts_are_the_same_every_time_and_come_from_most_documents() -> None:
    prompts = held_out_prompts(60, 96)
    used = [text for text in corpus().held_out if any(prompt in text for prompt in prompts)]

    assert prompts == held_out_prompts(60, 96)
    assert 2 * len(used) > len(corpus().held_out)


def test_more_prompts_than_the_text_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="Ask for fewer or shorter prompts"):
        held_out_prompts(100_000, 96)
