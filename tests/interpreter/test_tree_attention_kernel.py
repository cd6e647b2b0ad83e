"""The kernel that merges a tree with its prefix, beside its formula and beside attention to everything at once."""

import math
from dataclasses import replace

import pytest
import torch

from attn_backends.kernels.tree_attention import tree_attention
from builders import BatchBuffers
from builders.kernels.prefix_lens import count_prefix
from builders.kernels.triton_runtime import torch_implementations
from tests.factories import make_cache, make_spec, make_tables

PLAIN = make_spec(head_dim=64)
SPECS = {
    "plain": PLAIN,
    "three heads a group": replace(PLAIN, num_q_heads=6),
    "sinks": replace(PLAIN, sinks=True),
    "soft cap": replace(PLAIN, soft_cap=1.5),
    "everything": replace(PLAIN, sinks=True, soft_cap=2.0, value_dim=72, scale=0.3),
    "dims that are no power of two": make_spec(head_dim=24, value_dim=40, page_size=3),
    "value dim of many tiles": replace(PLAIN, num_q_heads=8, value_dim=512),
    "bfloat16": replace(PLAIN, dtype=torch.bfloat16, kv_dtype=torch.bfloat16),
    "e4m3 cache": replace(PLAIN, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn),
}
BUSHY = [sum(1 << at for at in path) for path in ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4))]
WIDE = [1 | 1 << token | 1 << token // 2 for token in range(63)] + [-(2**63) | 1]
STAR = [1 | 1 << token for token in range(5)]
BATCHES = {
    "uniform, with an empty prefix and a row of padding": ([5, 5, 5], [5, 37, 130], [*BUSHY, *STAR, *BUSHY], 4),
    "ragged, as wide as a mask": ([5, 64, 1, 3], [20, 130, 70, 3], [*BUSHY, *WIDE, 1, 1, 3, 5], None),
    "single tokens": ([1, 1], [1, 66], [1, 1], 3),
}


class Trees:
    """A batch of trees over a cache that is NaN wherever no request's token lies."""

    def __init__(self, spec, query_lens, seq_lens, masks, pad_reqs):
        generator = torch.Generator().manual_seed(3)
        tables = make_tables(seq_lens, page_sizes=(spec.page_size,), max_reqs=4, max_seq_len=136)
        batch = BatchBuffers(tables, max_tokens=80)
        num_reqs, num_tokens = batch.load(query_lens, seq_lens, pad_reqs=pad_reqs)
        cache = make_cache(spec, tables.num_pages[0])
        owned = torch.zeros(cache.num_pages, spec.page_size, dtype=torch.bool)
        self.slots = []
        for request, length in enumerate(seq_lens):
            at = torch.arange(length)
            self.slots.append((tables.block_tables[0, request, at // spec.page_size].long(), at % spec.page_size))
            owned[self.slots[-1]] = True
        for part in (cache.key, cache.value):
            part.copy_(torch.where(owned[..., None, None], part.float(), torch.nan).to(part.dtype))
        query = torch.randn(num_tokens, spec.num_q_heads + 1, spec.head_dim, generator=generator)[:, 1:]
        self.query = query.to(spec.cache_dtype if spec.cache_dtype.itemsize == 1 else spec.dtype)
        self.sinks = torch.randn(spec.num_q_heads, generator=generator) if spec.sinks else None
        self.masks = torch.tensor(masks + [0] * (num_tokens - len(masks)))
        self.spec, self.cache, self.max_query_len = spec, cache, max(query_lens)
        self.query_lens, self.seq_lens = query_lens, seq_lens
        self.tensors = (
            tables.block_tables[0, :num_reqs],
            batch.seq_lens[:num_reqs],
            batch.query_start_loc[: num_reqs + 1],
        )

    def of_prefix(self, base_2):
        """What another kernel leaves: out and lse over the prefixes; where one is empty, what must not be read."""
        heads, tokens = self.spec.num_q_heads, len(self.query)
        out = torch.full((tokens, heads, self.spec.out_dim), torch.nan).to(self.spec.dtype)
        lse = torch.full((heads, tokens), torch.nan)
        for rows, scores, values in self.requests():
            cached = scores.shape[-1] - (rows.stop - rows.start)
            if cached:
                prefix = scores[..., :cached]
                out[rows] = (prefix.softmax(-1) @ values[:, :cached]).transpose(0, 1).to(out.dtype)
                lse[:, rows] = prefix.logsumexp(-1) / (math.log(2) if base_2 else 1.0)
        return out, lse.t()

    def merged(self, base_2=False):
        out, lse = self.of_prefix(base_2)
        tree_attention(
            self.query, self.cache.key, self.cache.value, *self.tensors, self.sinks, self.masks, out, lse, base_2,
            self.max_query_len, self.spec.softmax_scale, self.spec.soft_cap,
        )  # fmt: skip
        return out

    def at_once(self):
        """Attention in fp32 to all that each query token sees, in one softmax."""
        out = torch.zeros(len(self.query), self.spec.num_q_heads, self.spec.out_dim)
        for rows, scores, values in self.requests():
            count, length = rows.stop - rows.start, scores.shape[-1]
            for token in range(count):
                mask = int(self.masks[rows.start + token]) % 2**64
                seen = [*range(length - count), *(length - count + j for j in range(count) if mask >> j & 1)]
                weights = scores[:, token, seen].exp()
                total = weights.sum(-1, keepdim=True) + (0.0 if self.sinks is None else self.sinks.exp()[:, None])
                out[rows.start + token] = torch.einsum("hn,hnd->hd", weights / total, values[:, seen])
        return out

    def requests(self):
        """Rows of the query, scores [H, q, L] and values [H, L, E] of each request, in fp32."""
        start = 0
        for query_len, slots in zip(self.query_lens, self.slots, strict=True):
            rows = slice(start, start := start + query_len)
            key, value = (
                part[slots].float().repeat_interleave(self.spec.group_size, 1).transpose(0, 1)
                for part in (self.cache.key, self.cache.value)
            )
            scores = self.query[rows].float().transpose(0, 1) @ key.transpose(1, 2) * self.spec.softmax_scale
            if self.spec.soft_cap:
                scores = self.spec.soft_cap * torch.tanh(scores / self.spec.soft_cap)
            yield rows, scores, value


def tolerance(spec):
    return {"rtol": 2e-2, "atol": 2e-2} if spec.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("base_2", [False, True], ids=["natural", "base 2"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_merged_trees_of_every_batch_shape(name, batch, base_2):
    trees = Trees(SPECS[name], *batch)
    by_kernel = trees.merged(base_2)
    torch.testing.assert_close(by_kernel, trees.at_once(), rtol=1e-4, atol=1e-5)
    with torch_implementations():
        torch.testing.assert_close(trees.merged(base_2), by_kernel, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_merged_trees_of_every_kind_of_spec(spec):
    trees = Trees(spec, *BATCHES["uniform, with an empty prefix and a row of padding"])
    by_kernel = trees.merged()
    torch.testing.assert_close(by_kernel.float(), trees.at_once(), **tolerance(spec))
    with torch_implementations():
        torch.testing.assert_close(trees.merged(), by_kernel, **tolerance(spec))


def by_both(trees, call):
    yield call()
    with torch_implementations():
        yield call()


def test_rows_of_padding_are_zero_whatever_the_sinks():
    trees = Trees(SPECS["everything"], *BATCHES["uniform, with an empty prefix and a row of padding"])
    for sink in (0.5, math.inf, -math.inf):
        trees.sinks = torch.full_like(trees.sinks, sink)
        assert all(out[15:].eq(0).all() for out in by_both(trees, trees.merged))


def test_a_sink_of_minus_infinity_is_none_and_one_of_infinity_gives_zero():
    trees = Trees(SPECS["sinks"], *BATCHES["ragged, as wide as a mask"])
    trees.sinks = torch.tensor([-math.inf, math.inf, 0.5, -math.inf])
    found = list(by_both(trees, trees.merged))
    trees.sinks = None
    for out, bare in zip(found, by_both(trees, trees.merged), strict=True):
        assert out[:, 1].eq(0).all() and not torch.equal(out[:, 2], bare[:, 2])
        torch.testing.assert_close(out[:, [0, 3]], bare[:, [0, 3]], rtol=1e-6, atol=1e-7)


def test_a_key_of_nan_makes_nan_of_the_tokens_and_heads_that_see_it_and_of_no_other():
    trees = Trees(PLAIN, *BATCHES["uniform, with an empty prefix and a row of padding"])
    page, offset = (int(part[32 + 3]) for part in trees.slots[1])
    trees.cache.key[page, offset, 1] = torch.nan
    for out in by_both(trees, trees.merged):
        wrong = torch.zeros_like(out, dtype=torch.bool)
        wrong[5 + 3, 2:] = True  # of the star's tokens that one alone sees it
        assert torch.equal(out.isnan(), wrong)


@pytest.mark.parametrize("lse", [-math.inf, math.nan], ids=["lse of none", "lse of nan"])
def test_a_prefix_of_nan_passes_through_whatever_its_lse(lse):
    """FlashAttention-3 has -inf for a sum that is NaN."""
    trees = Trees(PLAIN, *BATCHES["uniform, with an empty prefix and a row of padding"])
    right = trees.of_prefix

    def broken(base_2):
        out, of_prefix = right(base_2)
        out[7, 1], of_prefix[7, 1] = torch.nan, lse
        return out, of_prefix

    trees.of_prefix = broken
    for out in by_both(trees, trees.merged):
        wrong = torch.zeros_like(out, dtype=torch.bool)
        wrong[7, 1] = True
        assert torch.equal(out.isnan(), wrong)


def test_a_prefix_that_outweighs_the_tree_leaves_it_no_share_and_the_other_way_round():
    trees = Trees(PLAIN, *BATCHES["uniform, with an empty prefix and a row of padding"])
    right = trees.of_prefix(False)
    for lse, wanted in ((1e4, right[0][5:15]), (-1e4, None)):
        trees.of_prefix = lambda base_2, lse=lse: (right[0].clone(), torch.full_like(right[1], lse))
        for out in by_both(trees, trees.merged):
            assert out.isfinite().all()
            if wanted is not None:
                torch.testing.assert_close(out[5:15], wanted, rtol=1e-6, atol=1e-7)
            else:
                assert not torch.allclose(out[5:15], right[0][5:15])


@pytest.mark.parametrize("rows", [1, 4, 300])
def test_count_prefix(rows):
    generator = torch.Generator().manual_seed(rows)
    counts = torch.randint(0, 7, (rows,), generator=generator)
    lengths = torch.where(torch.arange(rows) % 3 == 2, 0, counts + torch.randint(0, 99, (rows,), generator=generator))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    found = torch.full((rows + 1,), 7, dtype=torch.int32)
    count_prefix(found[:rows], lengths.int(), starts)
    wanted = [max(length - count, 0) for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)]
    assert found.tolist() == [*wanted, 7]
    with torch_implementations():
        count_prefix(found[:rows].zero_(), lengths.int(), starts)
    assert found.tolist() == [*wanted, 7]
