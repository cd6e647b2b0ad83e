"""A tree merged with its prefix, compared with attention to everything at once."""

import math
from dataclasses import replace

import pytest
import torch

from attn_backends.kernels.tree_attention import tree_attention
from builders.kernels.prefix_lens import count_prefix
from tests.attn_backends.kernels.attention_oracle import attend, scores_of, tokens_of
from tests.factories import batch_of, indexes_fp8, make_cache, make_spec

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
    "e4m3 by head": replace(PLAIN, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, head_scales=True),
}
BUSHY = [sum(1 << at for at in path) for path in ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4))]
WIDE = [1 | 1 << token | 1 << token // 2 for token in range(63)] + [-(2**63) | 1]
STAR = [1 | 1 << token for token in range(5)]
BATCHES = {
    "uniform, with an empty prefix and a row of padding": ([5, 5, 5], [5, 37, 130], [*BUSHY, *STAR, *BUSHY], 4),
    "ragged, as wide as a mask": ([5, 64, 1, 3], [20, 130, 70, 3], [*BUSHY, *WIDE, 1, 1, 3, 5], None),
    "single tokens": ([1, 1], [1, 66], [1, 1], 3),
}
UNIFORM = BATCHES["uniform, with an empty prefix and a row of padding"]


class Trees:
    """A batch of trees over a cache that is NaN wherever no request's token lies."""

    def __init__(self, spec, query_lens, seq_lens, masks, pad_reqs):
        generator = torch.Generator().manual_seed(3)
        self.tensors, owned, num_tokens = batch_of(query_lens, seq_lens, pad_reqs, spec.page_size, 136)
        cache = make_cache(spec, len(owned))
        for part in (cache.key, cache.value):
            part.copy_(torch.where(owned[..., None, None], part.float(), torch.nan).to(part.dtype))
        query = torch.randn(num_tokens, spec.num_q_heads + 1, spec.head_dim, generator=generator)[:, 1:]
        self.query = query.to(spec.cache_dtype if spec.cache_dtype.itemsize == 1 else spec.dtype)
        self.sinks = torch.randn(spec.num_q_heads, generator=generator) if spec.sinks else None
        self.masks = torch.tensor(masks + [0] * (num_tokens - len(masks)))
        self.spec, self.cache, self.max_query_len = spec, cache, max(query_lens)
        self.query_lens, self.seq_lens = query_lens, seq_lens

    def requests(self):
        """Of each request the rows of the query, and its keys and values."""
        start = 0
        for pages, count, length in zip(self.tensors[0], self.query_lens, self.seq_lens, strict=False):
            rows = slice(start, start := start + count)
            yield rows, *tokens_of(self.cache, pages, length, self.spec)

    def of_prefix(self, base_2):
        """What another kernel leaves: out and lse over the prefixes; where one is empty, what must not be read."""
        heads, tokens = self.spec.num_q_heads, len(self.query)
        out = torch.full((tokens, heads, self.spec.out_dim), torch.nan, dtype=self.spec.dtype)
        lse = torch.full((heads, tokens), -math.inf)
        for rows, keys, values in self.requests():
            for row in range(rows.start, rows.stop):
                cached = range(len(keys) - (rows.stop - rows.start))
                if cached:
                    out[row] = attend(self.query[row], keys, values, cached, self.spec, None)
                    scores = scores_of(self.query[row], keys[cached], self.spec)
                    lse[:, row] = scores.logsumexp(0) / (math.log(2) if base_2 else 1.0)
        return out, lse.t()

    def arguments(self, base_2=False):
        """Of the op."""
        return (
            self.query, self.cache.key, self.cache.value, *self.tensors, self.sinks, self.masks,
            *self.of_prefix(base_2), base_2, self.max_query_len, self.spec.softmax_scale, self.spec.soft_cap,
            self.cache.key_scale, self.cache.value_scale,
        )  # fmt: skip

    def merged(self, base_2=False):
        tree_attention(*(arguments := self.arguments(base_2)))
        return arguments[8]

    def at_once(self):
        """Attention to all that each query token sees, in one softmax."""
        out = torch.zeros(len(self.query), self.spec.num_q_heads, self.spec.out_dim)
        for rows, keys, values in self.requests():
            count = rows.stop - rows.start
            cached = len(keys) - count
            for row in range(rows.start, rows.stop):
                mask = int(self.masks[row]) % 2**64
                seen = [*range(cached), *(cached + j for j in range(count) if mask >> j & 1)]
                out[row] = attend(self.query[row], keys, values, seen, self.spec, self.sinks)
        return out


def tolerance(spec):
    return {"rtol": 2e-2, "atol": 2e-2} if spec.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("base_2", [False, True], ids=["natural", "base 2"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_merged_trees_match_reference_for_every_batch(name, batch, base_2):
    trees = Trees(SPECS[name], *batch)
    torch.testing.assert_close(trees.merged(base_2), trees.at_once(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, id=name, marks=[indexes_fp8] * ("e4m3" in name)) for name, spec in SPECS.items()],
)
def test_merged_trees_match_reference_for_every_spec(spec):
    trees = Trees(spec, *UNIFORM)
    torch.testing.assert_close(trees.merged().float(), trees.at_once(), **tolerance(spec))


def padding_with(sink):
    trees = Trees(SPECS["everything"], *UNIFORM)
    trees.sinks = torch.full_like(trees.sinks, sink)
    return trees


@pytest.mark.parametrize("sink", [0.5, math.inf, -math.inf])
def test_tree_padding_rows_are_zero_for_any_sink(sink):
    assert padding_with(sink).merged()[15:].eq(0).all()


def sinks_without_end():
    trees = Trees(SPECS["sinks"], *BATCHES["ragged, as wide as a mask"])
    trees.sinks = torch.tensor([-math.inf, math.inf, 0.5, -math.inf])
    return trees


def test_infinite_sinks_zero_output_or_have_no_effect():
    trees = sinks_without_end()
    out = trees.merged()
    trees.sinks = None
    bare = trees.merged()
    assert out[:, 1].eq(0).all() and not torch.equal(out[:, 2], bare[:, 2])
    torch.testing.assert_close(out[:, [0, 3]], bare[:, [0, 3]], rtol=1e-6, atol=1e-7)


def key_of_nan():
    """Of the second request's star, seen by the token of that place alone, in the heads of the second KV head."""
    trees = Trees(PLAIN, *UNIFORM)
    trees.cache.key[trees.tensors[0][1, 35 // 4], 35 % 4, 1] = torch.nan
    return trees


def prefix_of_nan(lse):
    """FlashAttention-3 has -inf for a sum that is NaN."""
    trees = Trees(PLAIN, *UNIFORM)
    out, of_prefix = trees.of_prefix(False)
    out[7, 1], of_prefix[7, 1] = torch.nan, lse
    trees.of_prefix = lambda base_2: (out.clone(), of_prefix)
    return trees


WRONG = {"key": (key_of_nan, (8, slice(2, None)))} | {
    f"prefix, lse {lse}": (lambda lse=lse: prefix_of_nan(lse), (7, 1)) for lse in (-math.inf, math.nan)
}


@pytest.mark.parametrize(("make", "place"), WRONG.values(), ids=WRONG)
def test_nan_reaches_only_tokens_that_see_it(make, place):
    out = make().merged()
    wrong = torch.zeros_like(out, dtype=torch.bool)
    wrong[place] = True
    assert torch.equal(out.isnan(), wrong)


def weighed(lse):
    """Every prefix weighs as much as this says."""
    trees = Trees(PLAIN, *UNIFORM)
    out, of_prefix = trees.of_prefix(False)
    trees.of_prefix = lambda base_2: (out.clone(), torch.full_like(of_prefix, lse))
    return trees


def test_merge_is_finite_if_prefix_or_tree_dominates():
    (heavy, light), prefix = (weighed(lse).merged() for lse in (1e4, -1e4)), Trees(PLAIN, *UNIFORM).of_prefix(False)[0]
    assert heavy.isfinite().all() and light.isfinite().all()
    torch.testing.assert_close(heavy[5:15], prefix[5:15], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(light[5:15], prefix[5:15])


def samples():
    """Of the op, for its kernel."""
    for name in ("plain", "everything"):
        for batch in BATCHES.values():
            for base_2 in (False, True):
                yield Trees(SPECS[name], *batch).arguments(base_2)
    cases = [Trees(spec, *UNIFORM) for spec in SPECS.values()]
    cases += [padding_with(sink) for sink in (0.5, math.inf, -math.inf)]
    cases += [sinks_without_end(), weighed(1e4), weighed(-1e4), *(make() for make, _ in WRONG.values())]
    yield from (trees.arguments() for trees in cases)


@pytest.mark.parametrize("rows", [1, 4, 300])
def test_count_prefix_matches_loop(rows):
    generator = torch.Generator().manual_seed(rows)
    counts = torch.randint(0, 7, (rows,), generator=generator)
    lengths = torch.where(torch.arange(rows) % 3 == 2, 0, counts + torch.randint(0, 99, (rows,), generator=generator))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    found = torch.full((rows + 1,), 7, dtype=torch.int32)
    count_prefix(found[:rows], lengths.int(), starts)
    wanted = [max(length - count, 0) for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)]
    assert found.tolist() == [*wanted, 7]
