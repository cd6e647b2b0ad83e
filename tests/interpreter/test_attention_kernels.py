from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from attn_backends.kernels.paged_attention import paged_attention
from builders import BatchBuffers
from builders.kernels.triton_runtime import torch_implementations
from tests.factories import make_cache, make_spec, make_tables
from tests.tree_masks import TREE_LENS, tree_masks

PLAIN = make_spec(head_dim=64)
SPECS = {
    "plain": PLAIN,
    "batch invariant": replace(PLAIN, sinks=True, batch_invariant=True),
    "no grouping": replace(PLAIN, num_kv_heads=4),
    "three heads a group": replace(PLAIN, num_q_heads=6),
    "window": replace(PLAIN, sliding_window=5),
    "sinks": replace(PLAIN, sinks=True),
    "soft cap": replace(PLAIN, soft_cap=1.5),
    "everything": replace(PLAIN, sliding_window=70, sinks=True, soft_cap=2.0, value_dim=72),
    "dim that is no power of two": make_spec(head_dim=80),
    "scores in the hundreds": replace(PLAIN, scale=30.0),
    "bfloat16": replace(PLAIN, dtype=torch.bfloat16, kv_dtype=torch.bfloat16),
}
BATCHES = {
    "decode": ([1, 1, 1], [1, 66, 130], 4),
    "extend": ([5, 5], [5, 99], 3),
    "ragged": ([9, 1, 40], [20, 3, 130], None),
}


def attention(spec, query_lens, seq_lens, pad_reqs, splits, tree_masks=None):
    """A call of the op as a function without arguments, over NaN wherever no request's token lies."""
    generator = torch.Generator().manual_seed(3)
    tables = make_tables(seq_lens, page_sizes=(spec.page_size,), max_reqs=4, max_seq_len=136)
    batch = BatchBuffers(tables, max_tokens=80)
    num_reqs, num_tokens = batch.load(query_lens, seq_lens, pad_reqs=pad_reqs)
    cache = make_cache(spec, tables.num_pages[0])
    owned = torch.zeros(cache.num_pages, spec.page_size, dtype=torch.bool)
    for request, length in enumerate(seq_lens):
        for position in range(length):
            owned[tables.block_tables[0, request, position // spec.page_size], position % spec.page_size] = True
    cache.key[~owned] = cache.value[~owned] = float("nan")
    query = torch.randn(num_tokens, spec.num_q_heads, spec.head_dim, generator=generator).to(spec.dtype)
    sinks = torch.randn(spec.num_q_heads, generator=generator) if spec.sinks else None
    return lambda: paged_attention(
        query, cache.key, cache.value, tables.block_tables[0, :num_reqs], batch.seq_lens[:num_reqs],
        batch.query_start_loc[: num_reqs + 1], max_query_len=max(query_lens), max_seq_len=136,
        num_splits=splits,
        scale=spec.softmax_scale, sliding_window=spec.sliding_window, soft_cap=spec.soft_cap, sinks=sinks,
        tree_masks=tree_masks, causal=spec.causal,
        batch_invariant=spec.batch_invariant,
    )  # fmt: skip


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("spec", [SPECS["plain"], SPECS["everything"]], ids=["plain", "everything"])
def test_paged_attention_of_every_batch_shape(spec, batch, splits):
    call = attention(spec, *batch, splits)
    by_kernel = call()
    with torch_implementations():
        torch.testing.assert_close(by_kernel, call(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_paged_attention_of_blocks(name, batch, splits):
    call = attention(replace(SPECS[name], causal=False), *batch, splits)
    by_kernel = call()
    with torch_implementations():
        torch.testing.assert_close(by_kernel, call(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("spec", [PLAIN, replace(PLAIN, sliding_window=64)], ids=["all", "window"])
def test_paged_attention_of_trees(spec, splits):
    call = attention(spec, TREE_LENS, [20, 130, 70], None, splits, tree_masks())
    by_kernel = call()
    with torch_implementations():
        torch.testing.assert_close(by_kernel, call(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_paged_attention_of_every_kind_of_spec(spec, splits):
    call = attention(spec, [2, 2], [7, 70], 3, splits)
    by_kernel = call()
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if spec.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    with torch_implementations():
        torch.testing.assert_close(by_kernel, call(), **tolerance)


@pytest.mark.parametrize("splits", [1, 3])
def test_paged_attention_of_padding_rows_is_zero(splits):
    assert attention(SPECS["everything"], [2, 2], [7, 70], 4, splits)()[4:].eq(0).all()


def test_more_splits_than_blocks_change_nothing():
    args = (PLAIN, [1, 1], [1, 130], 2)
    torch.testing.assert_close(attention(*args, 8)(), attention(*args, 1)(), rtol=1e-5, atol=1e-6)


SPLITS = [1, 2, 4]


def requests(spec, seq_lens, splits, sinks=None):
    """Arguments of the op for requests of one query token each, and their keys and values in pages of one request."""
    generator = torch.Generator().manual_seed(5)
    pages = -(-max(seq_lens) // spec.page_size)
    table = torch.arange(len(seq_lens) * pages, dtype=torch.int32).view(-1, pages)
    cache = make_cache(spec, table.numel())
    query = torch.randn(len(seq_lens), spec.num_q_heads, spec.head_dim, generator=generator)
    starts, lens = torch.arange(len(seq_lens) + 1, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32)
    args = (
        query, cache.key, cache.value, table, lens, starts, sinks, None, 1, max(seq_lens), splits, spec.softmax_scale,
        spec.sliding_window, spec.soft_cap, spec.causal, spec.batch_invariant,
    )  # fmt: skip
    return args, [t.unflatten(0, (-1, pages)).flatten(1, 2) for t in (cache.key, cache.value)]


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("by_torch", [False, True], ids=["kernel", "torch"])
def test_a_key_of_nan_makes_nan_of_the_heads_that_see_it_and_of_no_other(by_torch, splits):
    args, (keys, _) = requests(PLAIN, [130, 130, 70], splits)
    keys[0, 3, 1] = keys[2, 69, 0] = float("nan")
    with torch_implementations() if by_torch else nullcontext():
        found = paged_attention(*args).isnan()
    assert found[0].any(1).tolist() == [False, False, True, True] and not found[1].any()
    assert found[2].any(1).tolist() == [True, True, False, False] and torch.equal(found.any(2), found.all(2))


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("by_torch", [False, True], ids=["kernel", "torch"])
def test_a_sink_of_minus_infinity_is_none_and_one_of_infinity_gives_zero(by_torch, splits):
    inf = float("inf")
    args, _ = requests(PLAIN, [130, 0, 70, 1], splits, torch.tensor([-inf, inf, 0.5, -inf]))
    with torch_implementations() if by_torch else nullcontext():
        out, bare = paged_attention(*args), paged_attention(*args[:6], None, *args[7:])
    assert out[:, 1].eq(0).all() and out[1].eq(0).all()
    torch.testing.assert_close(out[:, [0, 3]], bare[:, [0, 3]], rtol=1e-6, atol=1e-7)
    assert (out[[0, 2, 3], 2] - bare[[0, 2, 3], 2]).abs().amax(1).gt(1e-3).all()


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("window", [1, 20, 64])
def test_a_window_may_start_anywhere_about_the_edge_of_a_block(window, splits):
    """Blocks are of 16, 32 or 64 tokens: every start from the last token before such an edge to the first after it."""
    spec = replace(PLAIN, sliding_window=window)
    args, (keys, values) = requests(spec, [edge + window + off for edge in (16, 32, 64) for off in (-1, 0, 1)], splits)
    for request, length in enumerate(args[4].tolist()):
        keys[request, : length - window] = values[request, : length - window] = float("nan")
    by_kernel = paged_attention(*args)
    with torch_implementations():
        wanted = paged_attention(*args[:1], *(t.nan_to_num() for t in args[1:3]), *args[3:])
    torch.testing.assert_close(by_kernel, wanted, rtol=1e-4, atol=1e-5)
