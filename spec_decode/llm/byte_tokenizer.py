"""The shipped pair's tokens: bytes."""

from __future__ import annotations

BOS = 0
"""Begins every document and ends the one before. No document holds this byte."""


def encode(text: str) -> list[int]:
    """BOS and the utf-8 bytes of text."""
    return [BOS, *text.encode()]


def decode(ids: list[int]) -> str:
    """The text of ids without BOS. An incomplete utf-8 sequence becomes U+FFFD."""
    return bytes(ids).replace(bytes([BOS]), b"").decode(errors="replace")
