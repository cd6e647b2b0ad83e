"""Caches in each layout: what the spec chooses, what the tensors tell, and bytes with gaps between pages."""

import math
from dataclasses import replace

import pytest
import torch

from attn_backends import FP8_DS_MLA, KVCache, KVScales, cache_layout, get
from attn_backends.kernels.fp8_ds_mla import TOKEN_BYTES, page_bytes
from attn_backends.kv_cache import LATENT, PLAIN
from builders import AttentionKind, BatchBuffers, BatchError
from tests.factories import CPU, indexes_fp8, make_spec, make_tables

SPEC = make_spec(
    num_kv_heads=1, head_dim=512, kind=AttentionKind.MLA, sliding_window=8, dtype=torch.bfloat16,
    kv_dtype=torch.float8_e4m3fn,
)  # fmt: skip
PAGE = page_bytes(SPEC.page_size)


def bytes_of_pages(stride, start):
    """A cache of fp8_ds_mla whose pages are so many bytes apart; the last ends with its memory."""
    memory = torch.zeros(8 * stride, dtype=torch.uint8)
    pages = memory.as_strided((8, SPEC.page_size, 1, TOKEN_BYTES), (stride, TOKEN_BYTES, TOKEN_BYTES, 1), start)
    return KVCache(pages, pages)


@indexes_fp8
@pytest.mark.parametrize("name", ["sparse_swa_mla", "torch_reference"])
@pytest.mark.parametrize("start", [0, PAGE], ids=["the first of two", "the second of two"])
def test_separated_byte_pages_match_contiguous_pages(name, start):
    backend, buffers = get(name), BatchBuffers(make_tables([9, 5]), max_tokens=4)
    num_reqs, num_tokens = buffers.load([2, 2], [9, 5])
    builder = backend.builder(SPEC, CPU, max_reqs=2, max_tokens=4, max_seq_len=9)
    metadata = builder.build(buffers.view(0, num_reqs=num_reqs, num_tokens=num_tokens, max_query_len=2, max_seq_len=9))
    generator = torch.Generator().manual_seed(0)
    latent, query = (torch.randn(4, heads, 512, generator=generator).bfloat16() for heads in (1, SPEC.num_q_heads))
    caches = bytes_of_pages(PAGE, 0), bytes_of_pages(2 * PAGE, start)
    for cache in caches:
        backend.write_kv(latent, latent, cache, metadata)
    outs = [backend.forward(query, cache, metadata, spec=SPEC) for cache in caches]
    assert torch.equal(*outs) and outs[0].any()
    assert torch.equal(caches[0].key, caches[1].key)


MLA = make_spec(num_kv_heads=1, head_dim=64, value_dim=32, kind=AttentionKind.MLA)
LAYOUTS = {"plain": (make_spec(value_dim=8), PLAIN), "latent": (MLA, LATENT), "fp8_ds_mla": (SPEC, FP8_DS_MLA)}


@pytest.mark.parametrize(("spec", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_cache_has_the_layout_that_its_spec_chose(spec, layout):
    assert cache_layout(spec) is layout
    cache = layout.allocate(spec, 3, CPU)
    assert cache.layout is layout and cache.num_pages == 3 and cache.latent is (layout is not PLAIN)
    layout.check(cache, spec, CPU)
    key_dim, value_dim, dtype = layout.token(spec)
    assert (cache.key.shape[-1], cache.value.shape[-1], cache.key.dtype) == (key_dim, value_dim, dtype)


def test_bytes_of_tokens_that_lie_apart_are_refused():
    """A page holds the scales of its tokens behind all their data."""
    wide = torch.zeros(5, SPEC.page_size, 1, 1024, dtype=torch.uint8)[..., :TOKEN_BYTES]
    latent, slots = torch.zeros(1, 1, 512).bfloat16(), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(BatchError, match=r"must be 584 bytes apart, got strides \(4096, 1024, 1024, 1\)"):
        FP8_DS_MLA.write(latent, latent, KVCache(wide, wide), slots)
    assert not wide.any()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ([0.0], [1.0], "the key scale .* must be positive and finite, got 0.0 at index 0"),
        ([1.0], [-2.0], "the value scale .* got -2.0"),
        ([1.0, math.nan], [1.0, 1.0], "got nan at index 1"),
        ([1.0], [math.inf], "got inf"),
        ([1e-60], [1.0], "got 1e-60"),
        (["1"], [1.0], "got '1'"),
        ([True], [1.0], "got True"),
        ([1.0, 1.0], [1.0], "as many scales, got 2 and 1"),
        ([], [], "as many scales, got 0 and 0"),
    ],
)
def test_scales_that_are_no_factors_are_refused(key, value, message):
    with pytest.raises(BatchError, match=message):
        KVScales.of(key, value, CPU)


@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 0), ({"kv_dtype": torch.float8_e4m3fn}, 1), ({"kv_dtype": torch.float8_e4m3fn, "head_scales": True}, 2)],
)
def test_a_cache_has_as_many_scales_as_its_spec(changes, count):
    spec = make_spec(**changes)
    cache = PLAIN.allocate(spec, 3, CPU)
    one, two = (KVScales.of([1.0] * n, [2.0] * n, CPU) for n in (1, 2))
    for held, scales in {0: None, 1: one, 2: two}.items():
        if held == count:
            PLAIN.check(replace(cache, scales=scales), spec, CPU)
        else:
            with pytest.raises(BatchError, match=r"has \d scales for keys|the key scales must be"):
                PLAIN.check(replace(cache, scales=scales), spec, CPU)
