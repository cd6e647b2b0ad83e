"""Text that the shipped pair was not trained on: some topics of `help()`, which is part of every CPython."""

from __future__ import annotations

import hashlib
from pydoc_data.topics import topics


def is_held_out(topic: str) -> bool:
    """Whether a topic is held out. Only its name decides, so every Python version holds out the same topics."""
    return hashlib.sha256(topic.encode()).digest()[0] % 12 == 0


def held_out_documents() -> list[str]:
    """Return the held-out topics' texts, sorted by topic."""
    return [text for topic, text in sorted(topics.items()) if is_held_out(topic)]


def held_out_prompts(count: int, prompt_bytes: int) -> list[str]:
    """Cut `count` distinct ASCII prompts of `prompt_bytes` bytes at line starts, spread over the documents.

    Raises ValueError if the documents hold fewer.
    """
    found = [cut for text in held_out_documents() for cut in _line_cuts(text.encode(), prompt_bytes)]
    distinct = list(dict.fromkeys(found))
    if count > len(distinct):
        raise ValueError(
            f"count is {count}, but the held-out text has {len(distinct)} prompts of {prompt_bytes} bytes. Request "
            "fewer or shorter prompts."
        )
    return [distinct[i * len(distinct) // count] for i in range(count)]


def _line_cuts(text: bytes, size: int) -> list[str]:
    starts = [0, *(i + 1 for i, byte in enumerate(text) if byte == ord("\n"))]
    cuts = [text[start : start + size] for start in starts]
    # ASCII only, so no cut falls inside a character.
    return [cut.decode() for cut in cuts if len(cut) == size and cut.isascii() and not cut[:1].isspace()]
