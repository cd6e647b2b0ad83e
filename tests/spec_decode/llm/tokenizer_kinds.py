"""Tokenizers of every kind, and models that say after each token which one you choose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<s>", "</s>", "<|turn|>"]
FAMILY = "👩‍👩‍👧é中"
MARKED = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
FALLBACK = [MARKED, {"type": "ByteFallback"}, {"type": "Fuse"}]
WORDPIECE = {"type": "WordPiece", "prefix": "##", "cleanup": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def sequence(*decoders: Any) -> Any:
    return {"type": "Sequence", "decoders": [*decoders]}


def byte_alphabet(text: str) -> str:
    """A text in the letters that byte-level tokenizers write bytes with."""
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return str(level.pre_tokenize_str(text)[0][0])


MARKS = ["▁", "▁the", "▁▁", "▁quick", "fox", ".", "s", "é", "▁\ufffd", "\ufffd", "\n"]
KINDS: dict[str, tuple[list[str], Any]] = {
    "byte level": (
        [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *map(byte_alphabet, [" the", "fox", " é", FAMILY])],
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    ),
    "byte fallback that strips": ([*BYTES, *MARKS], sequence(*FALLBACK, STRIP)),
    "byte fallback": ([*BYTES, *MARKS], sequence(*FALLBACK)),
    "unigram": (MARKS, METASPACE),
    "word pieces": (["the", "fox", "##es", "##s", ".", "'", "s", "n't", "é", "##"], WORDPIECE),
    "suffixes": (["the</w>", "fo", "x</w>", "</w>", "."], {"type": "BPEDecoder", "suffix": "</w>"}),
    "words": (["the", "fox", "."], None),
}


@cache
def tokenizer_of(kind: str) -> Any:
    pieces, decoder = KINDS[kind]
    words = [*SPECIAL, *pieces, "<tool>"]
    added = [
        {"id": words.index(word), "content": word, "special": word in SPECIAL}
        | dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
        for word in [*SPECIAL, "<tool>"]
    ]
    vocab = {word: i for i, word in enumerate(words)}
    fields = dict.fromkeys(["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"])
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<s>"}
    whole = {"version": "1.0", **fields, "added_tokens": added, "decoder": decoder, "model": model}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(whole)), bos_token="<s>", eos_token="</s>"
    )


def ids(kind: str, *pieces: str) -> list[int]:
    return [tokenizer_of(kind).convert_tokens_to_ids(piece) for piece in pieces]


def write_scripted(folder: Path, kind: str, follows: Mapping[str, str]) -> None:
    """Write a model that says follows[piece] after a piece: its embedding is one-hot and its layer adds nothing."""
    tokenizer = tokenizer_of(kind)
    size = len(tokenizer) + len(tokenizer) % 2
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for before, after in follows.items():
            model.lm_head.weight[ids(kind, after), ids(kind, before)] = 9
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
