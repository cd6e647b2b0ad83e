"""The training documents: the topics of `help()` that are not held out."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import NamedTuple

from spec_decode.testing.held_out_text import held_out_documents, is_held_out

SPLIT_RULE = "held out: sha256(topic name)[0] % 12 == 0; training drops their paragraphs and its own repeats"


class Corpus(NamedTuple):
    """Documents for training and for measurement. They share no paragraph."""

    train: list[str]
    held_out: list[str]


def paragraphs(text: str) -> dict[str, str]:
    """Map the words of each distinct paragraph to its text, so wrapping and indentation make no difference."""
    return {" ".join(part.split()): part for part in text.split("\n\n") if part.strip()}


def corpus() -> Corpus:
    """Return the documents, split by topic name."""
    held_out = held_out_documents()
    seen = {words for text in held_out for words in paragraphs(text)}
    train = []
    others = [text for topic, text in topics.items() if not is_held_out(topic)]
    # Long topics contain short ones: longest first keeps the long text in one piece.
    for text in sorted(others, key=len, reverse=True):
        fresh = {words: part for words, part in paragraphs(text).items() if words not in seen}
        seen.update(fresh)
        if fresh:
            train.append("\n\n".join(fresh.values()) + "\n")
    return Corpus(train, held_out)
