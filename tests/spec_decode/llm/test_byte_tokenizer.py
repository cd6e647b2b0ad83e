"""The shipped pair's tokens."""

from __future__ import annotations

import pytest

from spec_decode.llm.byte_tokenizer import BOS, decode, encode


@pytest.mark.parametrize("text", ["", "def f(x):\n    return x\n", "“naïve” → ≥ 1"])
def test_decode_inverts_encode(text: str) -> None:
    ids = encode(text)

    assert ids[0] == BOS
    assert BOS not in ids[1:]
    assert decode(ids) == text


def test_decode_drops_bos_and_replaces_incomplete_characters() -> None:
    assert decode([BOS, 97, BOS, 98, 0xE2, 0x80]) == "ab\ufffd"
