"""The tokenizer of the shipped pair: bytes."""

from __future__ import annotations

BOS = 0
"""Starts every document and ends the one before. No document contains this byte."""


def encode(text: str) -> list[int]:
    """Return BOS and the utf-8 bytes of text."""
    return [BOS, *text.encode()]


def decode(ids: list[int]) -> str:
    """Return the text of ids without BOS. An incomplete utf-8 sequence becomes U+FFFD."""
    return bytes(ids).replace(bytes([BOS]), b"").decode(errors="replace")
