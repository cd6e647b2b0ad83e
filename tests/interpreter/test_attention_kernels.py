from dataclasses import replace

import pytest
import torch

from attn_backends.kernels.latent_attention import LatentAttentionArguments
from attn_backends.kernels.paged_attention import PagedAttentionArguments, launch_merge, paged_attention
from benchmarks import tune_paged_attention
from builders.kernels.triton_runtime import torch_implementations
from tests.factories import indexes_fp8
from tests.ops.attention import LATENT_BATCHES, PLAIN, latent, paged
from tests.tree_masks import tree_masks

WINDOW = 64
FORMS = {"tree": ([5, 5, 3], [*tree_masks()[:5].tolist() * 2, 1, 3, 0]), "chain": ([5, 1, 3], None)}
"""Query tokens of three requests, and masks: the last tree's last token is not drafted yet."""


def assert_reads_no_token_before_the_windows(spec, query_lens, starts, splits, masks=None):
    """Of requests whose last window starts at these tokens, NaN stands before them."""
    seq_lens = [first + spec.sliding_window - 1 + count for first, count in zip(starts, query_lens, strict=True)]
    args = paged(spec, (query_lens, seq_lens, None), splits, masks)
    for table, first in zip(args[3], starts, strict=True):
        before = torch.arange(first)
        for cache in args[1:3]:
            cache[table[before // spec.page_size].long(), before % spec.page_size] = torch.nan
    by_kernel = paged_attention(*args)
    with torch_implementations():
        wanted = paged_attention(*args[:1], *(t.nan_to_num() for t in args[1:3]), *args[3:])
    torch.testing.assert_close(by_kernel, wanted, rtol=1e-4, atol=1e-5)


BY_HEAD = replace(PLAIN, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, head_scales=True)


@pytest.mark.parametrize(
    ("cached", "spec", "splits"),
    [(62, PLAIN, 1), (63, replace(PLAIN, scale=0.3), 2), pytest.param(64, BY_HEAD, 1, marks=indexes_fp8)],
)
def test_prompt_sees_whole_blocks_and_the_one_at_its_end(cached, spec, splits):
    """A block of 64 tokens ends behind the first query, at it, and before it."""
    args = paged(spec, ([66, 2], [cached + 66, 5], None), splits)
    by_kernel = paged_attention(*args)
    with torch_implementations():
        wanted = paged_attention(*args)
    close = {"rtol": 1e-4, "atol": 1e-5} if spec.dtype is torch.float32 else {"rtol": 2**-6, "atol": 2**-8}
    torch.testing.assert_close(by_kernel, wanted, **close)


@pytest.mark.parametrize("cached", [30, 31, 32])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(
    ("form", "causal"), [("chain", True), ("chain", False), ("tree", True)], ids=["chain", "block", "tree"]
)
def test_few_queries_see_whole_blocks_too(form, causal, splits, cached):
    """A block of 32 tokens ends behind what the first query of each request sees, at its end, and before it."""
    query_lens, masks = FORMS[form]
    lens = [cached + count for count in query_lens]
    args = paged(PLAIN, (query_lens, lens, None), splits, None if masks is None else torch.tensor(masks))
    arguments = PagedAttentionArguments(*args)._replace(causal=causal)
    by_kernel = arguments.launch({"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1})
    torch.testing.assert_close(by_kernel, arguments.reference(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [((1, 66, 3, 2, 64), [(64, 32), (128, 32), (128, 64)]), ((1, 3, 66, 1, 64, 2), [(16, 64), (16, 32)])],
)
def test_tuner_tries_tiles_and_notices_a_wrong_one(batch, sizes, monkeypatch):
    small = {"_DEVICE": torch.device("cpu"), "_HEADS": 2, "_TILES": ((32, 4, 2), (64, 4, 1))}
    for name, value in small.items():
        monkeypatch.setattr(tune_paged_attention, name, value)
    found = tune_paged_attention.compiled(tune_paged_attention.RandomBatch(*batch))
    tried = {(tile["BLOCK_M"], tile["BLOCK_N"]) for tile in found}
    assert tried >= {*sizes} and len({str(tile) for tile in found}) == len(found)
    launch = PagedAttentionArguments.launch
    monkeypatch.setattr(PagedAttentionArguments, "launch", lambda self, tile=None: launch(self, tile) + bool(tile))
    with pytest.raises(AssertionError):
        tune_paged_attention.compiled(tune_paged_attention.RandomBatch(*batch))


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 20, 64])
def test_window_may_start_anywhere_around_block_edge(window, splits):
    """Blocks are of 16, 32 or 64 tokens: every start from the last token before such an edge to the first after it."""
    for edge in (16, 32, 64):
        starts = [edge - 1, edge, edge + 1]
        assert_reads_no_token_before_the_windows(replace(PLAIN, sliding_window=window), [1] * 3, starts, splits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("query_lens", "masks"), FORMS.values(), ids=FORMS)
def test_multi_token_window_may_start_anywhere_in_page(query_lens, masks, splits):
    spec, masks = replace(PLAIN, sliding_window=WINDOW), None if masks is None else torch.tensor(masks)
    for first in range(2):
        assert_reads_no_token_before_the_windows(spec, query_lens, [first, first + 2, first + 4], splits, masks)


@pytest.mark.parametrize(("in_order", "splits"), [(False, 3), (True, 3), (False, 128)])
def test_merge_ignores_splits_without_tokens(in_order, splits):
    """A program merges 16 of the 40 dims of 128 splits."""
    generator = torch.Generator().manual_seed(1)
    partial, lse = torch.randn(splits, 2, 4, 40, generator=generator), torch.randn(splits, 2, 4, generator=generator)
    lse[1, 0], lse[:, 1, 3] = -torch.inf, -torch.inf
    wanted = (partial.double() * lse.double().exp2()[..., None]).sum(0)
    wanted /= lse.double().exp2().sum(0).clamp(min=1e-30)[..., None]
    partial[lse == -torch.inf] = torch.nan  # as unwritten memory may hold
    out = torch.empty(2, 4, 40)
    launch_merge(partial, lse, None, out, in_order=in_order, num_warps=1)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)


TILES = {
    "one row each": {"BLOCK_M": 16, "BLOCK_N": 32},
    "several tokens each": {"BLOCK_M": 32, "BLOCK_N": 64},
    "more rows than there are": {"BLOCK_M": 64, "BLOCK_N": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 6, 64])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_latent_attention_is_right_in_every_tile(tile, page_size):
    arguments = LatentAttentionArguments(*latent(LATENT_BATCHES[1], page_size=page_size))
    torch.testing.assert_close(arguments.launch(tile), arguments.reference(), rtol=1e-4, atol=1e-5)
