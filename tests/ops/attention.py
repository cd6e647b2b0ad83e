"""Samples of the ops of attention backends."""

import torch

import attn_backends.kernels.latent_attention
import attn_backends.kernels.latent_rotary
import attn_backends.kernels.paged_attention
import attn_backends.kernels.rope
import attn_backends.kernels.rope_and_write_kv
import attn_backends.kernels.sparse_attention
import attn_backends.kernels.tree_attention
import attn_backends.kernels.write_kv
import attn_backends.kernels.write_latent  # noqa: F401
from attn_backends.kernels.fp8_ds_mla import page_bytes
from tests.attn_backends.kernels.test_write_latent import hard_latents
from tests.ops.sample import CLOSE, each, int32, noise, op, whole

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SLOTS = torch.tensor([7, -1, 19, 0])
OUTSIDE = [torch.tensor([slot, 7, -1, slot]) for slot in (20, 2**40, -2, -(2**40))]
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
            yield key, value, noise(5, 4, 2, 16, seed=2, dtype=dtype), noise(5, 4, 2, value_dim, dtype=dtype), SLOTS
    key, value = noise(4, 3, 24), noise(4, 3, 24, seed=1)
    for slots in OUTSIDE:
        yield key, value, *noise(2, 5, 4, 3, 24), slots
    heads_first = noise(2, 5, 3, 4, 24).transpose(2, 3)
    yield key, value, *heads_first, SLOTS
    yield key, value, *noise(5, 2, 4, 3, 24).unbind(1), SLOTS


@op("attn_backends::rope_and_write_kv", close=CLOSE, strided="query key value key_cache value_cache")
def rope_and_write_kv():
    for (queries, keys, dim), dtype in each(((8, 2, 16), (9, 3, 16), (2, 2, 16), (3, 1, 24)), DTYPES[:2]):
        for slots in (SLOTS, *OUTSIDE[:2]):
            yield (
                noise(4, queries, dim, dtype=dtype), noise(4, keys, dim, seed=1, dtype=dtype),
                noise(4, keys, dim, seed=2, dtype=dtype), torch.tensor([3, 39, 0, 17]), noise(40, dim).cos(),
                *noise(2, 5, 4, keys, dim, dtype=dtype), slots,
            )  # fmt: skip


@op("attn_backends::prepare_query", close=CLOSE, strided="query")
def prepare_query():
    for (tokens, heads, dim, rotary), dtype in each(ROTARY, DTYPES):
        yield noise(tokens, heads, dim, dtype=dtype), torch.arange(tokens) * 9, noise(40, rotary).cos(), 1e-6


@op("attn_backends::inverse_rotary", strided="out")
def inverse_rotary():
    for (tokens, heads, dim, rotary), dtype in each(ROTARY, DTYPES):
        yield noise(tokens, heads, dim, dtype=dtype), torch.arange(tokens) * 9, noise(40, rotary).cos()


def any_bfloat16(tokens):
    """Finite numbers of every sign, exponent and mantissa."""
    latent = whole(0, 2**16, tokens, 512).short().view(torch.bfloat16)
    return latent.where(latent.isfinite(), 0.0)


def one_exponent_a_tile(tokens):
    """Numbers of about one size within a tile, so that none vanishes beside another."""
    return (noise(tokens, 8, 64) * torch.exp2(whole(-40, 40, tokens, 8, 1))).flatten(1).bfloat16()


@op("attn_backends::write_latent", close=CLOSE)
def write_latent():
    plain = None, None, None
    for dim, dtype in each((64, 80, 512, 576), DTYPES):
        yield noise(4, dim, dtype=dtype), noise(5, 4, dim, seed=3, dtype=dtype), SLOTS, *plain, 4, 0.0
    for (dim, rotary), dtype in each(((64, 64), (80, 6), (512, 64), (576, 64)), DTYPES):
        norm = noise(dim, seed=1), torch.arange(4) * 9, noise(40, rotary, seed=2).cos()
        yield noise(4, dim, dtype=dtype), torch.zeros(5, 4, dim, dtype=dtype), SLOTS, *norm, 4, 1e-6
    for slots in OUTSIDE:
        for cache in (torch.zeros(5, page_bytes(4), dtype=torch.uint8), torch.zeros(5, 4, 512).bfloat16()):
            yield noise(4, 512, dtype=torch.bfloat16), cache, slots, *plain, 4, 0.0
    for latents, page_size in each((hard_latents(), any_bfloat16(12), one_exponent_a_tile(12)), (1, 16)):
        cache = torch.full((len(latents) * 2 // page_size + 1, page_bytes(page_size)), 0xAB, dtype=torch.uint8)
        yield latents, cache, torch.arange(len(latents)) * 2 + 1, *plain, page_size, 0.0


def paged():
    table = torch.tensor([[0, 1], [2, 4], [3, 3]], dtype=torch.int32)
    return noise(6, 4, 16), *noise(2, 5, 4, 2, 16, seed=1), table, int32(6, 3, 0), int32(0, 2, 4, 6)


@op("attn_backends::paged_attention", close=CLOSE, strided="query key_cache value_cache")
def paged_attention():
    options = (
        (2, 1, 4),
        (None, 3),
        (None, 20.0),
        (True, False),
        (None, noise(4)),
        (None, torch.tensor([1, 3, 1, 3, 0, 0])),
    )
    for splits, window, soft_cap, causal, sinks, masks in each(*options):
        yield *paged(), sinks, masks, 2, 6, splits, 0.25, window, soft_cap, causal, False


@op("attn_backends::tree_attention", close=CLOSE, strided="query key_cache value_cache")
def tree_attention():
    for base_2, soft_cap, sinks in each((False, True), (None, 20.0), (None, noise(4))):
        lse = noise(4, 6).t()
        lse[4:] = -torch.inf
        masks = torch.tensor([1, 3, 1, 3, 0, 0])
        yield *paged(), sinks, masks, noise(6, 4, 16, seed=2), lse, base_2, 2, 0.25, soft_cap


@op("attn_backends::latent_attention", close=CLOSE, strided="query latent_cache")
def latent_attention():
    _, _, _, *tables = paged()
    for splits, causal, masks in each((2, 1, 3), (True, False), (None, torch.tensor([1, 3, 1, 3, 0, 0]))):
        yield noise(6, 4, 48), noise(5, 4, 48, seed=1), *tables, masks, 2, splits, 32, 0.25, causal, False


@op("attn_backends::sparse_attention", close=CLOSE, strided="query")
def sparse_attention():
    lists = torch.tensor([[0, 5, -1, 9], [3, 1, 2, 7], [1, 1, 1, 1]], dtype=torch.int32)
    for dim, sinks in each((64, 512), (None, noise(3))):
        yield noise(3, 3, dim), noise(5, 4, dim, seed=1), lists, int32(3, 4, 0), sinks, 4, 0.1, False
