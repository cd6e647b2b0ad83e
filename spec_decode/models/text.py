"""Real text that every CPython carries, as bytes: the language reference behind `help("topic")`."""

from __future__ import annotations

import hashlib
from pydoc_data.topics import topics
from typing import NamedTuple

BOS = 0
"""Begins every document and ends the one before; no document holds this byte."""

SPLIT_RULE = "held out: sha256(topic name)[0] % 12 == 0; training drops their paragraphs and its own repeats"


class Corpus(NamedTuple):
    """Documents of the two sides; they share no paragraph."""

    train: list[str]
    held_out: list[str]


def encode(text: str) -> list[int]:
    """BOS and the utf-8 bytes of text."""
    return [BOS, *text.encode()]


def decode(ids: list[int]) -> str:
    """The text of ids without BOS; a torn utf-8 sequence becomes U+FFFD."""
    return bytes(token for token in ids if token != BOS).decode(errors="replace")


def paragraphs(text: str) -> dict[str, str]:
    """Each distinct paragraph as it stands, by its words; wrapping and indentation do not tell it apart."""
    return {" ".join(part.split()): part for part in text.split("\n\n") if part.strip()}


def corpus() -> Corpus:
    """The documents, split by name, so that a topic is on the same side in every Python version."""
    held_out = [text for name, text in sorted(topics.items()) if _is_held_out(name)]
    seen = {words for text in held_out for words in paragraphs(text)}
    train = []
    others = [text for name, text in topics.items() if not _is_held_out(name)]
    # Long topics contain short ones: longest first leaves the running text whole.
    for text in sorted(others, key=len, reverse=True):
        fresh = {words: part for words, part in paragraphs(text).items() if words not in seen}
        seen.update(fresh)
        if fresh:
            train.append("\n\n".join(fresh.values()) + "\n")
    return Corpus(train, held_out)


def held_out_prompts(count: int, prompt_bytes: int) -> list[str]:
    """`count` distinct ASCII prompts of held-out text, from a line's start, spread over the documents."""
    found = [cut for text in corpus().held_out for cut in _line_cuts(text.encode(), prompt_bytes)]
    distinct = list(dict.fromkeys(found))
    if count > len(distinct):
        raise ValueError(
            f"the held-out text has {len(distinct)} prompts of {prompt_bytes} bytes, {count} were asked for; "
            "none were cut. Ask for fewer or shorter prompts."
        )
    return [distinct[i * len(distinct) // count] for i in range(count)]


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 12 == 0


def _line_cuts(text: bytes, size: int) -> list[str]:
    starts = [0, *(i + 1 for i, byte in enumerate(text) if byte == ord("\n"))]
    cuts = [text[start : start + size] for start in starts]
    # Only ASCII: a cut can then not tear a character apart.
    return [cut.decode() for cut in cuts if len(cut) == size and cut.isascii() and not cut[:1].isspace()]
