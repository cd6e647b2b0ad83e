"""Arguments of the ops whose kernels' tiles depend on sizes, as served models have them; tensors without memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

import tests.ops.attention
import tests.ops.drafting
import tests.ops.models
import tests.ops.sampling
import tests.ops.state  # noqa: F401
from attn_backends.kernels.fp8_ds_mla import page_bytes
from benchmarks.cases.recurrent_state import TILES
from builders import Recurrence, StateSpec
from builders.paged import SPLIT_TOKENS
from tests.ops.sample import TABLE

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
INT32, INT64 = torch.int32, torch.int64
REQUESTS, PAGE_SIZE, PAGES, CONTEXT = 8, 16, 4096, 8192
VOCAB, HIDDEN = 128256, 4096
Case = tuple[str, tuple[Any, ...]]
_QWEN = StateSpec(num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128, journal=16)
_MAMBA2 = replace(_QWEN, recurrence=Recurrence.SSD, num_key_heads=8, num_value_heads=128, value_dim=64)
STATE_LAYERS = (
    (_QWEN, 8),
    (replace(_QWEN, num_value_heads=32, journal=32), 16),
    (replace(_QWEN, num_key_heads=32, num_value_heads=32, journal=32, recurrence=Recurrence.KDA), 8),
    (_MAMBA2, 8),
    (replace(_MAMBA2, num_key_heads=1, num_value_heads=48), 4),
    (replace(_MAMBA2, num_key_heads=1, key_dim=256), 8),
    (StateSpec(num_value_heads=1, value_dim=2048, journal=16, conv_width=3, recurrence=Recurrence.CONV), 8),
)
"""Recurrent layers of Qwen3.5, Qwen3-Next, Kimi Linear, Nemotron-H, two of Granite 4 and LFM2, and the tokens of their
steps."""


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def batch(tokens: int) -> tuple[torch.Tensor, ...]:
    """Return block table, lengths and query starts."""
    return tensor(INT32, REQUESTS, CONTEXT // PAGE_SIZE), tensor(INT32, REQUESTS), tensor(INT32, REQUESTS + 1)


def scales(kv: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return one of keys and one of values, if the cache has any."""
    return (tensor(FP32, 1), tensor(FP32, 1)) if kv is FP8 else (None, None)


def paged(
    dim: int,
    group: int,
    queries: int,
    splits: int,
    *,
    tree: bool = False,
    invariant: bool = False,
    more: bool = False,
    kv: torch.dtype = BF16,
) -> Case:
    """more: with sinks, a window and a soft cap."""
    tokens = REQUESTS * queries
    query, caches = tensor(BF16, tokens, 4 * group, dim), (tensor(kv, PAGES, PAGE_SIZE, 4, dim) for _ in range(2))
    sinks, masks = tensor(FP32, 4 * group) if more else None, tensor(INT64, tokens) if tree else None
    features = (4096, 30.0) if more else (None, None)
    return "attn_backends::paged_attention", (
        query, *caches, *batch(tokens), sinks, masks, queries, CONTEXT, splits, 0.1, *features, True, invariant,
        *scales(kv),
    )  # fmt: skip


def attention() -> Iterator[Case]:
    for dim, (group, queries, splits), kv in product((64, 128, 256), ((4, 6, 4), (16, 512, 1)), (BF16, FP8)):
        yield paged(dim, group, queries, splits, kv=kv)
    for kv in (BF16, FP8):
        yield paged(128, 4, 4096, 1, kv=kv)
    yield paged(128, 4, 16, 4, tree=True)
    yield paged(128, 4, 16, 4, tree=True, kv=FP8)
    yield paged(128, 4, 6, CONTEXT // SPLIT_TOKENS, invariant=True)
    yield paged(64, 8, 6, 1, more=True)
    queries = 64
    for dim, kv in product((64, 128, 256), (BF16, FP8)):
        caches = (tensor(kv, PAGES, PAGE_SIZE, 4, dim) for _ in range(2))
        tokens = REQUESTS * queries
        query, lse = tensor(BF16, tokens, 16, dim), tensor(FP32, tokens, 16)
        yield "attn_backends::tree_attention", (
            query, *caches, *batch(tokens), None, tensor(INT64, tokens), query, lse, True, queries, 0.1, None,
            *scales(kv),
        )  # fmt: skip
    for heads, queries, dtype in ((16, 1, BF16), (128, 4, BF16), (128, 1, FP32)):
        tokens = REQUESTS * queries
        yield "attn_backends::latent_attention", (
            tensor(dtype, tokens, heads, 576), tensor(dtype, PAGES, PAGE_SIZE, 576), *batch(tokens), None, queries, 8,
            512, 0.1, True, False,
        )  # fmt: skip
    caches = (tensor(BF16, PAGES, 64, 512), tensor(torch.uint8, PAGES, page_bytes(64)))
    for cache, (tokens, heads, width) in product(caches, ((1, 64, 128), (64, 128, 128), (8, 128, 640))):
        yield "attn_backends::sparse_attention", (
            tensor(BF16, tokens, heads, 512), cache, tensor(INT32, tokens, width), tensor(INT32, tokens),
            tensor(FP32, heads), 64, 0.1, False,
        )  # fmt: skip
    yield "attn_backends::prepare_query", (tensor(BF16, 8, 128, 512), tensor(INT64, 8), tensor(FP32, 64, 64), 1e-6)
    yield "attn_backends::inverse_rotary", (tensor(BF16, 8, 128, 512), tensor(INT64, 8), tensor(FP32, 64, 64))
    norm = tensor(FP32, 512), tensor(INT64, 8), tensor(FP32, 64, 64)
    slots = tensor(INT64, 8)
    yield "attn_backends::write_latent", (tensor(BF16, 8, 512), tensor(BF16, 9, 64, 512), slots, *norm, 1e-6)
    yield "attn_backends::write_fp8_ds_mla", (tensor(BF16, 8, 512), caches[1], slots, *norm, 1e-6, 64)
    for kv_dtype in (BF16, FP8):
        key, cache = tensor(BF16, 8, 8, 128), tensor(kv_dtype, 9, PAGE_SIZE, 8, 128)
        yield "attn_backends::write_kv", (key, key, cache, cache, slots, *scales(kv_dtype))
        yield "attn_backends::rope_and_write_kv", (
            tensor(BF16, 8, 32, 128), key, key, slots, tensor(FP32, 64, 128), cache, cache, slots,
            *scales(kv_dtype),
        )  # fmt: skip


def models() -> Iterator[Case]:
    def streamed(rows: int, outputs: int, inputs: int, dtype: torch.dtype, gated: bool, round_x: bool) -> Case:
        scale = tensor(FP32, outputs) if dtype is FP8 else None
        return "attn_backends::streamed_linear", (
            tensor(BF16, rows, inputs), tensor(dtype, outputs, inputs), *[None] * 4, gated, None, scale, None, round_x,
        )  # fmt: skip

    for rows, dtype in product((8, 128), (BF16, FP8)):
        yield streamed(rows, 2 * 14336, HIDDEN, dtype, True, False)
        yield streamed(rows, HIDDEN, 14336, dtype, False, False)
    for rows, (outputs, inputs, gated) in product(
        (32, 64, 65, 96, 160, 192, 256), ((HIDDEN, 14336, False), (5632, 1024, True))
    ):
        yield streamed(rows, outputs, inputs, FP8, gated, True)
    for rows, (outputs, inputs, gated), dtype in product(
        (1, 2), ((1024, 1024, False), (2 * 14336, HIDDEN, True)), (BF16, FP8)
    ):
        x, scale = tensor(BF16, rows, inputs), tensor(FP32, outputs) if dtype is FP8 else None
        norm = tensor(BF16, inputs)
        yield "attn_backends::skinny_linear", (
            x, tensor(dtype, outputs, inputs), None, None, x, norm, None, 1e-6, gated, scale
        )  # fmt: skip
    for dtype in (BF16, FP8):
        scale = tensor(FP32, 32, 4096) if dtype is FP8 else None
        yield "attn_backends::streamed_linear", (
            tensor(BF16, 8, 2880), tensor(dtype, 32, 4096, 2880), tensor(INT32, 32), tensor(INT64, 32), None, None,
            True, 7.0, scale, 1.7, False,
        )  # fmt: skip
        for outputs in (HIDDEN, VOCAB):
            yield "attn_backends::batch_invariant_linear", (
                tensor(BF16, 8, 1, HIDDEN), tensor(dtype, 1, outputs, HIDDEN), None,
                tensor(FP32, 1, outputs) if dtype is FP8 else None,
            )  # fmt: skip
    x = tensor(BF16, 8, HIDDEN)
    yield "attn_backends::add_rms_norm", (x, x, tensor(BF16, HIDDEN), 1e-6)
    yield "attn_backends::add_rms_norm", (x, tensor(FP32, 4, 8, HIDDEN), tensor(BF16, HIDDEN), 1e-6)
    yield "attn_backends::swiglu", (tensor(BF16, 8, 2 * 14336), None, None, False)
    yield "attn_backends::narrow_rows", (x,)
    yield "spec_decode::embed_concat", (tensor(INT64, 8), tensor(BF16, VOCAB, HIDDEN), x, [x[0], x[0]], 1e-6)
    yield "spec_decode::route_tokens", (tensor(FP32, 8, 256), tensor(FP32, 256), 8, "sigmoid", 8, 4, True, 2.5, None)
    yield "spec_decode::combine_experts", (tensor(BF16, 64, HIDDEN), tensor(FP32, 8, 8), tensor(INT64, 8, 8), x)
    yield "spec_decode::read_streams", (
        tensor(BF16, 8, 4, HIDDEN), tensor(FP32, 8, 24), tensor(FP32, 3), tensor(FP32, 24), 20, 1e-6,
    )  # fmt: skip
    yield "spec_decode::write_streams", (
        tensor(BF16, 8, 4, HIDDEN), x, tensor(FP32, 8, 4), tensor(FP32, 8, 4, 4)
    )  # fmt: skip


def sampling() -> Iterator[Case]:
    rows, steps = 8, 5
    integer, real = tensor(INT64, rows), tensor(FP32, rows)
    count = tensor(INT32, rows)
    logits = tensor(FP32, rows, VOCAB)
    yield "spec_decode::restrict_logits", (logits, count, real, real)
    processed, drafts = tensor(FP32, rows, 1 + steps, VOCAB), tensor(FP32, rows, steps, VOCAB)
    verified = processed, tensor(INT64, rows, steps), drafts, real, integer, integer, integer
    yield "spec_decode::rejection_sample", verified
    yield "spec_decode::block_verify", verified
    yield "spec_decode::top_children", (logits, 8, None)


def state() -> Iterator[Case]:
    """Layers of `STATE_LAYERS` in steps, trees and prompts."""
    slots, prompt = 64, 512
    for spec, queries in STATE_LAYERS:
        tree_tokens = 32 if spec.key_dim <= 128 else 16
        matrices, journal, decays, channels = spec.matrices, spec.journal, spec.decay_dims, spec.conv_channels
        skip, keys = tensor(FP32, matrices) if spec.recurrence.rule.skips else None, (spec.num_key_heads, spec.key_dim)
        for count, absorb, masks in ((queries, False, None), (tree_tokens, False, INT64), (prompt, True, None)):
            tokens = REQUESTS * count
            yield "attn_backends::state_step", (
                tensor(BF16, tokens, channels), tensor(FP32, tokens, *decays), tensor(FP32, tokens, matrices),
                tensor(BF16, channels, spec.conv_width), None, skip,
                tensor(FP32, slots, matrices, spec.key_dim, spec.value_dim),
                tensor(BF16, slots, spec.conv_width - 1 + journal, channels), tensor(FP32, slots, journal, *keys),
                tensor(FP32, slots, journal, matrices, spec.value_dim), tensor(FP32, slots, journal, *decays),
                tensor(INT32, slots), tensor(INT32, slots), *batch(tokens)[:0:-1], tensor(INT32, REQUESTS),
                masks and tensor(masks, tokens), count, CONTEXT, absorb, True, 0, spec.recurrence.value,
            )  # fmt: skip

    for (block_v, warps), decays, skip in product(TILES, ((48,), (48, 128)), (None, tensor(FP32, 48))):
        tokens = REQUESTS * 8
        yield "benchmarks::column_states", (
            tensor(FP32, tokens, 80 * 128), tensor(FP32, tokens, *decays), tensor(FP32, tokens, 48),
            skip, tensor(FP32, REQUESTS, 9, 48, 128, 128), skip is None, 16, block_v, warps,
        )  # fmt: skip


def cases() -> list[Case]:
    """Return the cases of this file, and the first sample of every other op."""
    served = [*attention(), *models(), *sampling(), *state()]
    return served + [(op, TABLE[op].samples[0]) for op in sorted({*TABLE} - {op for op, _ in served})]
