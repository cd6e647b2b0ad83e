"""The documents to train on, and the split."""

from __future__ import annotations

from train_pair.corpus import corpus, paragraphs


def test_training_and_evaluation_text_share_no_paragraph() -> None:
    train, held_out = ({words for text in documents for words in paragraphs(text)} for documents in corpus())

    assert len(held_out) > 50
    assert len(train) > 10 * len(held_out)
    assert not train & held_out


def test_training_text_has_each_paragraph_once() -> None:
    found = [words for text in corpus().train for words in paragraphs(text)]

    assert len(found) == len(set(found))
