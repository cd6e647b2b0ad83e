"""The text of new tokens is the same however they arrive, for tokenizers of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_decode import LLM, SamplingParams
from spec_decode.llm.incremental_decoder import IncrementalDecoder
from spec_decode.llm.stop_strings import GrowingText
from tests.spec_decode.llm.tokenizer_kinds import (
    BYTES,
    FAMILY,
    KINDS,
    SPECIAL,
    byte_alphabet,
    ids,
    tokenizer_of,
    write_scripted,
)

pytest.importorskip("transformers")

from spec_decode.models.hf.token_text import token_text


def decode_of(kind: str) -> Callable[[Sequence[int]], str]:
    return token_text(tokenizer_of(kind))


def streamed(kind: str, prompt: Sequence[int], *chunks: Sequence[int]) -> list[str]:
    decoder = IncrementalDecoder(decode_of(kind), prompt)
    return [*(decoder.add(chunk) for chunk in chunks), decoder.finish()]


@st.composite
def tokens(draw: st.DrawFn, kind: str) -> list[int]:
    """Tokens, some of which make whole characters."""
    size = len(KINDS[kind][0]) + len(SPECIAL) + 1
    text = st.sampled_from(["中", "文", "é", "😀", FAMILY])
    spelled = text.map(lambda text: [*text.encode()]).map(lambda data: ids(kind, *(BYTES[byte] for byte in data)))
    alone = st.integers(0, size).map(lambda token: [token])  # the last is in no vocabulary
    parts = draw(st.lists(st.one_of(alone, spelled) if BYTES[0] in KINDS[kind][0] else alone, max_size=40))
    return [token for part in parts for token in part]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.data())
def test_every_split_of_tokens_gives_same_text(kind: str, data: st.DataObject) -> None:
    decode, prompt, new = decode_of(kind), data.draw(tokens(kind)), data.draw(tokens(kind))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(new)), max_size=6)))
    chunks = [new[start:end] for start, end in pairwise([0, *cuts, len(new)])]
    one_by_one = "".join(streamed(kind, prompt, *([token] for token in new)))
    assert one_by_one == "".join(streamed(kind, prompt, *chunks)) == "".join(streamed(kind, prompt, new))
    before, whole = decode(prompt), decode([*prompt, *new])
    if whole.startswith(before):
        assert one_by_one == whole[len(before) :]
    else:  # the new tokens completed the prompt's last character
        assert whole.endswith(one_by_one) and before.startswith(whole[: len(whole) - len(one_by_one)])


@pytest.mark.parametrize("kind", ["byte fallback that strips", "unigram"])
def test_first_token_keeps_space_before_it(kind: str) -> None:
    prompt = ids(kind, "<s>", "▁the")
    assert "".join(streamed(kind, prompt, ids(kind, "▁quick"))) == " quick"
    assert "".join(streamed(kind, [*prompt, *ids(kind, *["<|turn|>"] * 40)], ids(kind, "▁quick"))) == " quick"
    for nothing in ([], ids(kind, "<s>")):
        assert "".join(streamed(kind, nothing, ids(kind, "▁quick"), ids(kind, "▁the"))) == "quick the"


def test_stop_string_may_start_with_leading_space() -> None:
    kind = "byte fallback that strips"
    text = GrowingText(decode_of(kind), [" quick"], prompt=ids(kind, "▁the"))
    text.add(ids(kind, "▁quick"))
    assert text.stopped and text.text == ""
    begun = GrowingText(decode_of(kind), ["the quick"], prompt=ids(kind, "▁the"))
    begun.add(ids(kind, "▁quick"))
    assert not begun.stopped, "a stop string that begins in the prompt is no part of the text"


@pytest.mark.parametrize("kind", ["byte fallback that strips", "byte fallback", "byte level"])
@pytest.mark.parametrize("end", range(1, 4))
def test_incomplete_character_becomes_one_replacement_sign(kind: str, end: int) -> None:
    data = "中文😀".encode()[: -4 + end]
    letters = [BYTES[byte] for byte in data] if "fallback" in kind else list(byte_alphabet("中文😀"))[: len(data)]
    new = ids(kind, *letters)
    assert "".join(streamed(kind, [], new)) == "".join(streamed(kind, [], *([t] for t in new))) == "中文\ufffd"
    # The character that the prompt began is part of the text that completes it.
    for cut in range(1, 3):
        assert "".join(streamed(kind, new[:cut], *([t] for t in new[cut:]))) == "中文\ufffd"


def test_invalid_bytes_leave_neighbouring_characters() -> None:
    kind = "byte fallback"
    new = ids(kind, *(BYTES[byte] for byte in b"\xff" + "中".encode() + b"\xe4\xb8" + "é".encode()), "fox")
    assert decode_of(kind)(new) == "\ufffd中\ufffdéfox"


@pytest.mark.parametrize("endless", ["fox", "<|turn|>", "\ufffd", "<0xFF>", "<0x80>"])
def test_each_token_is_decoded_with_few_others(endless: str) -> None:
    kind, most, decode = "byte fallback that strips", 0, decode_of("byte fallback that strips")

    def measured(token_ids: Sequence[int]) -> str:
        nonlocal most
        most = max(most, len(token_ids))
        return decode(token_ids)

    decoder = IncrementalDecoder(measured, ids(kind, "▁the"))
    for _ in range(500):
        decoder.add(ids(kind, endless))
    assert most < 80
    assert decoder.add(ids(kind, "▁quick", ".")).endswith(" quick.")


def test_a_model_streams_what_it_generates(tmp_path: Path) -> None:
    kind, pieces = "byte fallback that strips", ["▁the", "▁quick", *(BYTES[byte] for byte in "中文".encode()[:-1])]
    write_scripted(tmp_path, kind, dict(pairwise(pieces)))
    llm = LLM(tmp_path, device="cpu")
    for prompt, expected in ([ids(kind, "▁the"), " quick中\ufffd"], [ids(kind, *pieces[:3]), "中\ufffd"]):
        params = SamplingParams(max_tokens=len(pieces) - len(prompt))
        (found,) = llm.generate([prompt], params)
        assert found.text == "".join(chunk.text for chunk in llm.stream([prompt], params)) == expected
    assert llm.generate([ids(kind, "▁the")], SamplingParams(stop=" quick"))[0].text == ""
