"""vLLM's KV cache as keys and values: views for the supported layouts, an error for all others."""

import itertools

import pytest
import torch

from attn_backends.engines.vllm.kv_views import keys_and_values, latents
from attn_backends.kernels.paged_attention import paged_attention
from attn_backends.kernels.write_kv import write_kv
from builders import BatchError

PAGES, HEADS, PAGE, DIM = 5, 2, 16, 64


def packed(order=(0, 1, 2, 3), layers=3):
    """One layer's view [pages, heads, page, 2 * dim] of memory that holds all layers' in another order of the dims."""
    sizes = [PAGES, HEADS, PAGE, 2 * DIM]
    memory = torch.zeros(layers, *(sizes[dim] for dim in order))
    return memory[1].permute(*(order.index(dim) for dim in range(4)))


@pytest.mark.parametrize("order", [(*outer, 3) for outer in itertools.permutations(range(3))])
def test_write_lands_right_in_every_layout(order):
    cache = packed(order)
    store = keys_and_values(cache, DIM)
    key, value = torch.randn(1, HEADS, DIM), torch.randn(1, HEADS, DIM)
    write_kv(key, value, store.key, store.value, torch.tensor([3 * PAGE + 7]))
    assert torch.equal(cache[3, :, 7], torch.cat([key[0], value[0]], -1))
    assert cache.count_nonzero() == 2 * HEADS * DIM


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_attention_over_vllm_cache_matches_contiguous(order):
    cache, query = packed(order).normal_(), torch.randn(2, 4, DIM)
    table = torch.tensor([[4, 1], [2, 3]], dtype=torch.int32)
    lens, starts = torch.tensor([20, 9], dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    numbers = (table, lens, starts, None, None, 1, 32, 1, DIM**-0.5, None, None, True, False, None, None)
    store = keys_and_values(cache, DIM)
    plain = paged_attention(query, store.key.contiguous(), store.value.contiguous(), *numbers)
    assert torch.equal(paged_attention(query, store.key, store.value, *numbers), plain)


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param(torch.zeros(PAGES, 2, PAGE, HEADS, DIM), id="keys and values in a dim of their own"),
        pytest.param(torch.zeros(PAGES, HEADS, PAGE, 2 * DIM + 4), id="scales beside them"),
        pytest.param(torch.zeros(PAGES, HEADS, 2 * DIM, PAGE).transpose(2, 3), id="a strided last dim"),
    ],
)
def test_unsupported_layout_is_rejected(cache):
    with pytest.raises(BatchError, match=r"must be \[pages, heads, page size, 128\].*got \["):
        keys_and_values(cache, DIM)


def test_latent_values_are_the_first_dims():
    cache = torch.randn(PAGES, PAGE, 80)[:, ::2]
    store = latents(cache, 80, 64)
    assert torch.equal(store.latents, cache) and torch.equal(store.value[:, :, 0], cache[..., :64]) and store.latent


@pytest.mark.parametrize("cache", [torch.zeros(PAGES, PAGE, 84), torch.zeros(PAGES, 1, PAGE, 80)])
def test_unsupported_latent_layout_is_rejected(cache):
    with pytest.raises(BatchError, match=r"must be \[pages, page size, 80\].*got \["):
        latents(cache, 80, 64)
