"""Prompts from text that the shipped pair was not trained on."""

from __future__ import annotations

import pytest

from spec_decode.testing.held_out_text import held_out_documents, held_out_prompts


def test_prompts_are_distinct_unseen_text_at_line_starts() -> None:
    documents = held_out_documents()
    prompts = held_out_prompts(60, 96)

    assert len(set(prompts)) == 60
    for prompt in prompts:
        assert len(prompt.encode()) == 96
        assert any("\n" + prompt in "\n" + text for text in documents)


def test_prompts_repeat_and_cover_most_documents() -> None:
    prompts = held_out_prompts(60, 96)
    used = [text for text in held_out_documents() if any(prompt in text for prompt in prompts)]

    assert prompts == held_out_prompts(60, 96)
    assert 2 * len(used) > len(held_out_documents())


def test_too_many_prompts_are_rejected() -> None:
    with pytest.raises(ValueError, match="Request fewer or shorter prompts"):
        held_out_prompts(100_000, 96)
