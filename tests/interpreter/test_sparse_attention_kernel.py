import math

import pytest
import torch

from attn_backends.kernels import sparse_attention
from tests.attn_backends.kernels.test_sparse_attention import BF16, FP8, SparseCase

FORMS = {"plain": {"dtype": BF16, "dim": 512}, "fp8_ds_mla": FP8}


def force(monkeypatch, block_m, block_n, tokens_first):
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "TOKENS_FIRST": tokens_first, "num_warps": 8, "num_stages": 1}
    monkeypatch.setattr(sparse_attention, "tile_config", lambda *args: tile)


@pytest.mark.parametrize(
    ("tile", "lists"),
    [
        ((16, 32, True), (20, 3, 0, 1, 17)),
        ((16, 32, False), (20, 3, 0, 1, 17)),
        ((16, 8, False), (20, 3, 0, 1, 17)),
        ((16, 8, False), (0, 40, 6, 0, 16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_lists_in_one_and_many_blocks_are_right(monkeypatch, form, lists, tile):
    force(monkeypatch, *tile)
    SparseCase(lists, **form, heads=20 if tile[1] == 32 else 3).check()


@pytest.mark.parametrize("tile", [(16, 16, True), (16, 16, False), (16, 8, False)], ids=str)
def test_empty_list_and_infinite_sink_give_zero(monkeypatch, tile):
    force(monkeypatch, *tile)
    case = SparseCase((0, 12, 3))
    case.query[0] = case.query[2] = math.nan
    case.indices[2, :3] = -1
    out, bare = case.run(sinks=torch.tensor([math.inf, -math.inf, 0.0])), case.run(sinks=None)
    assert out[:, 0].eq(0).all() and torch.equal(out[:, 1], bare[:, 1])
    assert out[0].eq(0).all() and out[2].eq(0).all() and out[1].ne(0).any() and bare[::2].eq(0).all()


@pytest.mark.parametrize("tile", [(16, 16, True), (16, 16, False), (16, 2, False)], ids=str)
def test_nan_latent_reaches_only_token_listing_it(monkeypatch, tile):
    force(monkeypatch, *tile)
    case = SparseCase((5, 5))
    slot = int(case.indices[0, :5].max())
    case.cache[slot // 4, slot % 4] = math.nan
    found = case.run().isnan()
    assert found[0].all() and not found[1].any()
