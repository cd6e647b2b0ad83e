import math

import pytest
import torch

from attn_backends.kernels import sparse_attention
from builders import BatchError
from tests.attn_backends.kernels.test_sparse_attention import BF16, FP8, FP16, Asked

FORMS = {"plain": {"dtype": BF16, "dim": 512}, "fp8_ds_mla": FP8}
LISTS = {"short lists": (20, 3, 0, 1, 17), "longer lists": (0, 40, 6, 0, 16)}


def force(monkeypatch, block_m, block_n, tokens_first):
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "TOKENS_FIRST": tokens_first, "num_warps": 8, "num_stages": 1}
    monkeypatch.setattr(sparse_attention, "tile_config", lambda *args: tile)


@pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_tile_that_is_chosen(form, lists):
    Asked(lists, **form, heads=20).check()


@pytest.mark.parametrize("tokens_first", [True, False], ids=["tokens first", "heads first"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_list_in_one_block(monkeypatch, form, tokens_first):
    force(monkeypatch, 16, 32, tokens_first)
    Asked(LISTS["short lists"], **form, heads=20).check()


@pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_lists_of_many_blocks(monkeypatch, form, lists):
    force(monkeypatch, 16, 8, False)
    Asked(lists, **form, heads=3).check()


CASES = {
    "float32": {},
    "float16": {"dtype": FP16, "dim": 128},
    "no sinks": {"sinks": False},
    "one-token pages": {"page_size": 1},
    "fp8_ds_mla pages with padding": {**FP8, "page_size": 73},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_other_shapes_and_dtypes(case):
    Asked(**case).check()


@pytest.mark.parametrize("tokens_first", [True, False], ids=["tokens first", "heads first"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_an_empty_list_comes_out_as_zero_whatever_the_query_holds(monkeypatch, tokens_first, sinks):
    force(monkeypatch, 16, 16, tokens_first)
    asked = Asked((0, 4, 3), sinks=sinks)
    asked.query[0] = asked.query[2] = math.nan
    asked.indices[2, :3] = -1
    out = asked.run()
    assert out[0].eq(0).all() and out[2].eq(0).all() and out[1].ne(0).any()


def test_a_sink_of_minus_infinity_is_no_sink():
    asked = Asked()
    assert torch.equal(asked.run(sinks=torch.full((3,), -math.inf)), asked.run(sinks=None))


def test_strided_views_of_query_cache_and_lists():
    asked = Asked(LISTS["longer lists"], **FORMS["plain"])
    plain = asked.run()
    asked.query = torch.cat([asked.query, asked.query], 1)[:, :3]
    asked.cache = torch.cat([asked.cache, asked.cache], 2)[..., :512]
    asked.indices = torch.cat([asked.indices, asked.indices], 1)[:, : asked.indices.shape[1]]
    assert torch.equal(asked.run(), plain)


@pytest.mark.parametrize("tile", [(16, 16, True), (16, 16, False), (16, 8, False)], ids=str)
def test_a_sink_of_infinity_gives_zero(monkeypatch, tile):
    force(monkeypatch, *tile)
    asked = Asked((12, 0, 3))
    out, bare = asked.run(sinks=torch.tensor([math.inf, -math.inf, 0.0])), asked.run(sinks=None)
    assert out[:, 0].eq(0).all() and torch.equal(out[:, 1], bare[:, 1]) and out[1].eq(0).all()


@pytest.mark.parametrize("form", [{}, FP8], ids=["plain", "fp8_ds_mla"])
def test_an_entry_beyond_the_cache_is_skipped(form):
    asked = Asked((5, 3), **form)
    asked.indices[0, 2] = -1
    skipped = asked.run()
    for beyond in (asked.cache.shape[0] * asked.page_size, 2**31 - 1, -(2**31)):
        asked.indices[0, 2] = beyond
        assert torch.equal(asked.run(), skipped)


@pytest.mark.parametrize("tile", [(16, 16, True), (16, 16, False), (16, 2, False)], ids=str)
def test_a_latent_of_nan_makes_nan_of_the_token_that_lists_it(monkeypatch, tile):
    force(monkeypatch, *tile)
    asked = Asked((5, 5))
    slot = int(asked.indices[0, :5].max())
    asked.cache[slot // 4, slot % 4] = math.nan
    found = asked.run().isnan()
    assert found[0].all() and not found[1].any()


def test_what_the_kernel_would_misread_is_refused_before_its_launch():
    asked = Asked()
    with pytest.raises(BatchError, match=r"indices must be torch\.int32"):
        asked.run(indices=asked.indices.long())
