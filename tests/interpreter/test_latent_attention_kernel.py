import pytest
import torch

from attn_backends.kernels.latent_attention import LatentAttentionArguments, latent_attention
from builders import BatchBuffers
from builders.kernels.triton_runtime import torch_implementations
from tests.factories import make_tables
from tests.tree_masks import TREE_LENS, tree_masks

BATCHES = {
    "decode": ([1, 1, 1], [1, 34, 66], 4),
    "verify": ([5, 5], [5, 67], 3),
    "ragged": ([9, 1, 20], [20, 3, 70], None),
}
WIDTHS = {"deepseek": (512, 64), "narrow": (16, 32)}


def inputs(batch, *, page_size=4, heads=6, widths=(32, 16), dtype=torch.float32):
    """query, cache, block_table, seq_lens, query_start_loc and max_query_len, over NaN where no request's token is."""
    query_lens, seq_lens, pad_reqs = batch
    generator = torch.Generator().manual_seed(3)
    tables = make_tables(seq_lens, page_sizes=(page_size,), max_reqs=4, max_seq_len=72)
    buffers = BatchBuffers(tables, max_tokens=80)
    num_reqs, num_tokens = buffers.load(query_lens, seq_lens, pad_reqs=pad_reqs)
    cache = torch.full((tables.num_pages[0], page_size, sum(widths)), float("nan"))
    for request, length in enumerate(seq_lens):
        for position in range(length):
            page = tables.block_tables[0, request, position // page_size]
            cache[page, position % page_size] = torch.randn(sum(widths), generator=generator)
    query = torch.randn(num_tokens, heads, sum(widths), generator=generator)
    return (
        query.to(dtype), cache.to(dtype), tables.block_tables[0, :num_reqs], buffers.seq_lens[:num_reqs],
        buffers.query_start_loc[: num_reqs + 1], max(query_lens),
    )  # fmt: skip


def attention(*args, splits=1, value_dim=32, tree_masks=None, causal=True):
    *tensors, max_query_len = args
    return latent_attention(
        *tensors,
        tree_masks,
        max_query_len=max_query_len,
        num_splits=splits,
        value_dim=value_dim,
        scale=0.2,
        causal=causal,
        batch_invariant=False,
    )


@pytest.mark.parametrize("splits", [1, 3])
def test_latent_attention_of_trees(splits):
    args, masks = inputs((TREE_LENS, [20, 70, 30], None)), tree_masks()
    by_kernel = attention(*args, splits=splits, tree_masks=masks)
    with torch_implementations():
        torch.testing.assert_close(by_kernel, attention(*args, tree_masks=masks), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_latent_attention_of_every_batch_shape(batch, splits):
    args = inputs(batch)
    by_kernel = attention(*args, splits=splits)
    with torch_implementations():
        torch.testing.assert_close(by_kernel, attention(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_latent_attention_of_blocks(batch, splits):
    args = inputs(batch)
    by_kernel = attention(*args, splits=splits, causal=False)
    with torch_implementations():
        torch.testing.assert_close(by_kernel, attention(*args, causal=False), rtol=1e-4, atol=1e-5)


TILES = {
    "one row each": {"BLOCK_M": 16, "BLOCK_N": 32},
    "several tokens each": {"BLOCK_M": 32, "BLOCK_N": 64},
    "more rows than there are": {"BLOCK_M": 64, "BLOCK_N": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 6, 64])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_latent_attention_in_every_tile(tile, page_size):
    args = inputs(BATCHES["verify"], page_size=page_size)
    by_kernel = LatentAttentionArguments(*args[:-1], None, args[-1], 2, 32, 0.2, True, False).launch(tile)
    with torch_implementations():
        torch.testing.assert_close(by_kernel, attention(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [2, 16, 20, 128])
def test_latent_attention_of_every_number_of_heads(heads):
    args = inputs(([1, 1], [7, 20], 3), heads=heads)
    by_kernel = attention(*args, splits=2)
    with torch_implementations():
        torch.testing.assert_close(by_kernel, attention(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_latent_attention_of_every_width_and_dtype(widths, dtype):
    args = inputs(([2, 2], [7, 70], 3), widths=widths, dtype=dtype)
    by_kernel = attention(*args, splits=2, value_dim=widths[0])
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    with torch_implementations():
        torch.testing.assert_close(by_kernel, attention(*args, value_dim=widths[0]), **tolerance)


@pytest.mark.parametrize("splits", [1, 3])
def test_latent_attention_of_padding_rows_is_zero(splits):
    assert attention(*inputs(([2, 2], [7, 70], 4)), splits=splits)[4:].eq(0).all()


def test_more_splits_of_latents_than_blocks_change_nothing():
    args = inputs(([1, 1], [1, 66], 2))
    torch.testing.assert_close(attention(*args, splits=32), attention(*args), rtol=1e-5, atol=1e-6)


def test_latent_attention_over_strided_latents_and_queries():
    query, cache, *rest = inputs(BATCHES["decode"])
    packed = torch.full((cache.shape[1] + 1, cache.shape[0], 64), float("nan"))
    packed[:-1, :, :48] = cache.transpose(0, 1)
    columns = query.transpose(1, 2).contiguous().transpose(1, 2)
    plain = attention(query, cache, *rest)
    assert torch.equal(attention(columns, packed[:-1, :, :48].transpose(0, 1), *rest), plain)


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_a_latent_of_nan_makes_nan_of_the_request_that_sees_it_and_of_no_other(splits):
    query, cache, table, *rest = inputs(([1, 1, 1], [66, 66, 34], 4))
    cache[table[0, 0], 3] = cache[table[2, 8], 1] = float("nan")
    found = attention(query, cache, table, *rest, splits=splits).isnan()
    assert found[[0, 2]].all() and not found[[1, 3]].any()
