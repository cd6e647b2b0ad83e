"""Samples of the ops of attention backends."""

from dataclasses import replace
from itertools import product

import torch

import attn_backends.kernels.head_rotary
import attn_backends.kernels.latent_attention
import attn_backends.kernels.paged_attention
import attn_backends.kernels.rope
import attn_backends.kernels.rope_and_write_kv
import attn_backends.kernels.sparse_attention
import attn_backends.kernels.tree_attention
import attn_backends.kernels.write_fp8_ds_mla
import attn_backends.kernels.write_kv
import attn_backends.kernels.write_latent  # noqa: F401
from attn_backends.kernels.fp8_ds_mla import page_bytes
from attn_backends.kernels.sparse_attention import SparseAttentionArguments
from tests.attn_backends.kernels import test_sparse_attention as sparse
from tests.attn_backends.kernels import test_tree_attention
from tests.attn_backends.kernels.test_write_fp8_ds_mla import hard_latents
from tests.factories import batch_of, make_cache, make_spec
from tests.ops.sample import CLOSE, each, noise, op, whole
from tests.tree_masks import TREE_LENS, tree_masks

ROUNDED_ONCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5},
}
ROUNDED_PROBABILITIES = CLOSE | {torch.bfloat16: {"rtol": 2**-7, "atol": 2**-6}}
"""A GPU rounds each probability p to bfloat16, by up to 2^-8 of it, before it multiplies a value v: an output is off by
up to 2^-8 of the sum of p |v|, which is below 4 in the samples. The interpreter multiplies in fp32."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SLOTS = torch.tensor([7, -1, 19, 0])
OUTSIDE = [torch.tensor([slot, 7, -1, slot]) for slot in (20, 2**40, -2, -(2**40))]
PLAINLY = None, None
SCALES = (torch.tensor([0.7]), torch.tensor([3.0])), (torch.tensor([0.7, 1.3]), torch.tensor([3.0, 0.01]))
ROTARY = [(3, 5, 512, 64), (2, 70, 64, 64), (2, 1, 80, 6), (1, 3, 576, 64)]
"""Tokens, heads, dim and rotary dim."""


@op("attn_backends::rope", close=CLOSE, strided="x")
def rope():
    for heads, dim in ((3, 16), (1, 2), (6, 80)):
        for dtype in DTYPES[:2]:
            yield noise(3, heads, dim, dtype=dtype), torch.tensor([0, 31, 7]), noise(32, dim, seed=1).cos()


@op("attn_backends::write_kv", strided="key value key_cache value_cache")
def write_kv():
    for dtype in DTYPES:
        for value_dim in (16, 40):
            key, value = noise(4, 2, 16, dtype=dtype), noise(4, 2, value_dim, seed=1, dtype=dtype)
            caches = noise(5, 4, 2, 16, seed=2, dtype=dtype), noise(5, 4, 2, value_dim, dtype=dtype)
            yield key, value, *caches, SLOTS, None, None
    key, value = noise(4, 3, 24), noise(4, 3, 24, seed=1)
    for slots in OUTSIDE:
        yield key, value, *noise(2, 5, 4, 3, 24), slots, None, None
    edges = torch.tensor([0.0, 448, 449, 464, 465, 470, 500, 6e4, 2**-9, 2**-10, 1.5 * 2**-9, 0.3, torch.inf])
    for dtype in DTYPES:
        # Values at every edge of e4m3, and beyond.
        new = torch.cat([edges, -edges, torch.tensor([torch.nan]), noise(101) * 50]).to(dtype).view(4, 2, 16)
        for scales in SCALES:
            yield new, new, *torch.zeros(2, 5, 4, 2, 16).to(torch.float8_e4m3fn), SLOTS, *scales
    heads_first = noise(2, 5, 3, 4, 24).transpose(2, 3)
    yield key, value, *heads_first, SLOTS, None, None
    yield key, value, *noise(5, 2, 4, 3, 24).unbind(1), SLOTS, None, None


@op("attn_backends::rope_and_write_kv", close=CLOSE, strided="query key value key_cache value_cache")
def rope_and_write_kv():
    def of(queries=8, keys=2, dim=16, value_dim=None, dtype=torch.float32, kv_dtype=None, slots=SLOTS, scales=PLAINLY):
        packed = noise(4, queries + 2 * keys, dim, dtype=dtype)
        query, key, value = packed.split([queries, keys, keys], 1)
        value = value if value_dim is None else noise(4, keys, value_dim, seed=2, dtype=dtype)
        caches = (noise(5, 4, keys, part.shape[2], dtype=dtype).to(kv_dtype or dtype) for part in (key, value))
        return query, key, value, torch.tensor([3, 39, 0, 17]), noise(40, dim).cos(), *caches, slots, *scales

    for dtype in DTYPES[:2]:
        for sizes in ((8, 2, 16), (9, 3, 16), (2, 2, 16), (3, 1, 24)):
            yield of(*sizes, dtype=dtype)
    for slots in OUTSIDE:
        yield of(slots=slots)
    yield of(value_dim=40)
    for scales in SCALES:
        yield of(dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, scales=scales)


@op("attn_backends::prepare_query", close=CLOSE, strided="query")
def prepare_query():
    for (tokens, heads, dim, rotary), dtype in each(ROTARY, DTYPES):
        yield noise(tokens, heads, dim, dtype=dtype), torch.arange(tokens) * 9, noise(40, rotary).cos(), 1e-6


@op("attn_backends::inverse_rotary", strided="out")
def inverse_rotary():
    for (tokens, heads, dim, rotary), dtype in each(ROTARY, DTYPES):
        yield noise(tokens, heads, dim, dtype=dtype), torch.arange(tokens) * 9, noise(40, rotary).cos()
    # Ties, which round to the even bfloat16.
    ties = torch.tensor([1, 1, 1 + 2**-7, 1, -1, -1, -1 - 2**-7, -1]).bfloat16().view(1, 4, 2)
    yield ties, torch.tensor([0]), torch.tensor([[1, 2**-8]])


def any_bfloat16(tokens):
    """Return finite numbers of every sign, exponent and mantissa."""
    latent = whole(0, 2**16, tokens, 512).short().view(torch.bfloat16)
    return latent.where(latent.isfinite(), 0.0)


def one_exponent_a_tile(tokens):
    """Return numbers of similar size within a tile, so that none vanishes next to another."""
    return (noise(tokens, 8, 64) * torch.exp2(whole(-40, 40, tokens, 8, 1))).flatten(1).bfloat16()


@op("attn_backends::write_latent", close=CLOSE)
def write_latent():
    plain = None, None, None
    for dim, dtype in each((64, 80, 512, 576), DTYPES):
        yield noise(4, dim, dtype=dtype), noise(5, 4, dim, seed=3, dtype=dtype), SLOTS, *plain, 0.0
    for (dim, rotary), dtype in each(((64, 64), (80, 6), (512, 64), (576, 64)), DTYPES):
        norm = noise(dim, seed=1), torch.arange(4) * 9, noise(40, rotary, seed=2).cos()
        yield noise(4, dim, dtype=dtype), torch.zeros(5, 4, dim, dtype=dtype), SLOTS, *norm, 1e-6
    for slots in OUTSIDE:
        yield noise(4, 512, dtype=torch.bfloat16), torch.zeros(5, 4, 512).bfloat16(), slots, *plain, 0.0


@op("attn_backends::write_fp8_ds_mla", close=CLOSE)
def write_fp8_ds_mla():
    plain = None, None, None, 0.0
    for slots in OUTSIDE:
        cache = torch.zeros(5, page_bytes(4), dtype=torch.uint8)
        yield noise(4, 512, dtype=torch.bfloat16), cache, slots, *plain, 4
    for latents, page_size in each((hard_latents(), any_bfloat16(12), one_exponent_a_tile(12)), (1, 16)):
        cache = torch.full((len(latents) * 2 // page_size + 1, page_bytes(page_size)), 0xAB, dtype=torch.uint8)
        yield latents, cache, torch.arange(len(latents)) * 2 + 1, *plain, page_size
    # Zeros of either sign, which the norm keeps.
    norm = noise(512, seed=1), torch.arange(4) * 9, noise(40, 64, seed=2).cos()
    cache = torch.zeros(2, page_bytes(16), dtype=torch.uint8)
    yield torch.full((4, 512), -0.0).bfloat16(), cache, SLOTS, *norm, 1e-6, 16


PLAIN = make_spec(head_dim=64)
EVERYTHING = replace(PLAIN, sliding_window=70, sinks=True, soft_cap=2.0, value_dim=72)
SPECS = (
    PLAIN,
    replace(PLAIN, sinks=True, batch_invariant=True),
    replace(PLAIN, num_kv_heads=4),
    replace(PLAIN, num_q_heads=6),
    replace(PLAIN, sliding_window=5),
    replace(PLAIN, sinks=True),
    replace(PLAIN, soft_cap=1.5),
    EVERYTHING,
    make_spec(head_dim=80),
    replace(PLAIN, scale=30.0),
    replace(PLAIN, dtype=torch.bfloat16, kv_dtype=torch.bfloat16),
    replace(PLAIN, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn),
    replace(PLAIN, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, head_scales=True, sinks=True),
)
DECODE = ([1, 1, 1], [1, 66, 130], 4)
BATCHES = (DECODE, ([5, 5], [5, 99], 3), ([9, 1, 40], [20, 3, 130], None))
TREES = (TREE_LENS, [20, 130, 70], None)
LATENT_BATCHES = (([1, 1, 1], [1, 34, 66], 4), ([5, 5], [5, 67], 3), ([9, 1, 20], [20, 3, 70], None))


def paged(spec, batch, splits, masks=None):
    """Return inputs with NaN wherever no request has a token."""
    tensors, owned, tokens = batch_of(*batch, spec.page_size, 136)
    cache = make_cache(spec, len(owned))
    for part in (cache.key, cache.value):
        part.copy_(part.float().where(owned[..., None, None], torch.nan).to(part.dtype))
    return (
        noise(tokens, spec.num_q_heads, spec.head_dim, seed=3, dtype=spec.dtype) / 2, cache.key, cache.value, *tensors,
        noise(spec.num_q_heads) / 2 if spec.sinks else None, masks, max(batch[0]), 136, splits, spec.softmax_scale,
        spec.sliding_window, spec.soft_cap, spec.causal, spec.batch_invariant, cache.key_scale, cache.value_scale,
    )  # fmt: skip


@op("attn_backends::paged_attention", close=ROUNDED_PROBABILITIES, strided="query key_cache value_cache")
def paged_attention():
    for batch, spec, causal in product(BATCHES, (PLAIN, EVERYTHING), (True, False)):
        yield paged(replace(spec, causal=causal), batch, 3)
    for spec, batch in zip(SPECS, BATCHES * 4, strict=False):
        yield paged(spec, ([2, 2], [7, 70], 3), 3)
        yield paged(spec, batch, 1)
    for splits, window in ((1, None), (3, 64)):
        yield paged(replace(PLAIN, sliding_window=window), TREES, splits, tree_masks())
    yield paged(PLAIN, ([1, 1], [1, 130], 2), 8)
    yield paged(replace(PLAIN, causal=False, batch_invariant=True), BATCHES[1], 3)
    for splits in (1, 3):
        sample = paged(replace(PLAIN, sinks=True), ([1, 1, 1], [130, 70, 1], 4), splits)
        sample[6].copy_(torch.tensor([-torch.inf, torch.inf, 0.5, -torch.inf]))
        yield sample
        sample = paged(PLAIN, ([1, 1, 1], [130, 130, 70], None), splits)
        for request, position, head in ((0, 3, 1), (2, 69, 0)):
            sample[1][sample[3][request, position // 4], position % 4, head] = torch.nan
        yield sample


@op("attn_backends::tree_attention", close=ROUNDED_PROBABILITIES, strided="query key_cache value_cache")
def tree_attention():
    return test_tree_attention.samples()


def latent(batch, splits=2, *, page_size=4, heads=6, widths=(32, 16), dtype=torch.float32, masks=None, causal=True):
    """Return inputs with NaN wherever no request has a token."""
    tensors, owned, tokens = batch_of(*batch, page_size, 72)
    cache = noise(*owned.shape, sum(widths), seed=1).where(owned[..., None], torch.nan) / 2
    query = noise(tokens, heads, sum(widths), seed=3, dtype=dtype) / 2
    return query, cache.to(dtype), *tensors, masks, max(batch[0]), splits, widths[0], 0.2, causal, False


@op("attn_backends::latent_attention", close=CLOSE, strided="query latent_cache")
def latent_attention():
    for batch in LATENT_BATCHES:
        yield latent(batch, 1)
        for causal in (True, False):
            yield latent(batch, 3, causal=causal)
    yield latent((TREE_LENS, [20, 70, 30], None), 3, masks=tree_masks())
    for heads in (2, 16, 20, 128):
        yield latent(([1, 1], [7, 20], 3), heads=heads)
    for widths, dtype in each(((512, 64), (16, 32)), DTYPES):
        yield latent(([2, 2], [7, 70], 3), widths=widths, dtype=dtype)
    yield latent(([1, 1], [1, 66], 2), 32)
    for splits in (1, 4):
        sample = latent(([1, 1, 1], [66, 66, 34], 4), splits)
        for request, position in ((0, 3), (2, 33)):
            sample[1][sample[2][request, position // 4], position % 4] = torch.nan
        yield sample


@op("attn_backends::sparse_attention", close=ROUNDED_ONCE, strided="query latent_cache indices")
def sparse_attention():
    def of(case, sinks=None):
        if sinks is not None:
            case.sinks = torch.tensor(sinks)
        return tuple(getattr(case, name) for name in SparseAttentionArguments._fields)

    for case in sparse.CASES.values():
        yield of(sparse.SparseCase(**case))
    for lists, form in product(
        ((20, 3, 0, 1, 17), (0, 40, 6, 0, 16)), ({"dtype": torch.bfloat16, "dim": 512}, sparse.FP8)
    ):
        yield of(sparse.SparseCase(lists, **form, heads=20))
    yield of(sparse.SparseCase(), sinks=[-torch.inf] * 3)
    yield of(sparse.SparseCase((12, 0, 3)), sinks=[torch.inf, -torch.inf, 0.0])
    for form, beyond in product(({}, sparse.FP8), (None, 2**31 - 1, -(2**31))):
        edge = sparse.SparseCase((5, 3), **form)
        edge.indices[0, 2] = edge.cache.shape[0] * edge.page_size if beyond is None else beyond
        yield of(edge)
