from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from attn_backends.kernels.paged_attention import launch_merge, paged_attention
from builders.kernels.triton_runtime import torch_implementations
from tests.factories import make_cache
from tests.ops.attention import PLAIN, paged
from tests.tree_masks import tree_masks

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


WINDOW = 64
FORMS = {"tree": ([5, 5, 3], [*tree_masks()[:5].tolist() * 2, 1, 3, 0]), "chain": ([5, 1, 3], None)}
"""Query tokens of three requests, and masks: the last tree's last token is not drafted yet."""


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("query_lens", "masks"), FORMS.values(), ids=FORMS)
def test_no_token_before_every_window_of_a_request_is_read(query_lens, masks, page_size, splits):
    """A window starts at each slot of a page once, and just behind it."""
    spec = replace(PLAIN, sliding_window=WINDOW, page_size=page_size)
    masks = None if masks is None else torch.tensor(masks)
    batches = page_size // 3 + 1
    for start in range(batches):
        starts = (start, start + batches, start + 2 * batches)
        seq_lens = [first + WINDOW - 1 + count for first, count in zip(starts, query_lens, strict=True)]
        args = paged(spec, (query_lens, seq_lens, None), splits, masks)
        for table, first in zip(args[3], starts, strict=True):
            before = torch.arange(first)
            for cache in args[1:3]:
                cache[table[before // page_size].long(), before % page_size] = torch.nan
        by_kernel = paged_attention(*args)
        with torch_implementations():
            wanted = paged_attention(*args[:1], *(t.nan_to_num() for t in args[1:3]), *args[3:])
        torch.testing.assert_close(by_kernel, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_order", [False, True])
def test_the_merge_takes_nothing_from_a_split_without_tokens(in_order):
    generator = torch.Generator().manual_seed(1)
    partial, lse = torch.randn(3, 2, 4, 10, generator=generator), torch.randn(3, 2, 4, generator=generator)
    lse[1, 0], lse[:, 1, 3] = -torch.inf, -torch.inf
    wanted = (partial.double() * lse.double().exp2()[..., None]).sum(0)
    wanted /= lse.double().exp2().sum(0).clamp(min=1e-30)[..., None]
    partial[lse == -torch.inf] = torch.nan  # as unwritten memory may hold
    out = torch.empty(2, 4, 10)
    launch_merge(partial, lse, None, out, in_order=in_order, num_warps=1)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
