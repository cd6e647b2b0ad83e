"""Kernels whose rows must have the same bits in every batch, at sizes that cross blocks, splits and tiles."""

import pytest
import torch

from attn_backends.kernels import sparse_attention as sparse
from attn_backends.kernels.latent_attention import latent_attention
from attn_backends.kernels.linear.batch_invariant_linear import batch_invariant_linear
from attn_backends.kernels.paged_attention import paged_attention
from builders.paged import SPLIT_TOKENS
from tests.ops.sample import int32, noise, whole

PAGE = 32
LENGTHS = (3, 70, SPLIT_TOKENS + 40)
QUERY = 3
SPLITS = -(-max(LENGTHS) // SPLIT_TOKENS)


TABLES = torch.arange(3 * -(-max(LENGTHS) // PAGE), dtype=torch.int32).view(3, -1)


def paged(query, requests, query_len, splits, window=None):
    """query [requests, QUERY, heads, dim], of which the last query_len tokens are asked."""
    cache = noise(TABLES.numel(), PAGE, 2, 64, seed=1)
    last = query[requests, -query_len:]
    return paged_attention(
        last.flatten(0, 1), cache, cache.flip(3), TABLES[requests], int32(*(LENGTHS[r] for r in requests)),
        int32(*range(0, len(last) * query_len + 1, query_len)), noise(4, seed=2), None, query_len, max(LENGTHS),
        splits, 0.2, window, None, True, True, None, None,
    ).unflatten(0, last.shape[:2])  # fmt: skip


def latent(query, requests, query_len, splits):
    cache = noise(TABLES.numel(), PAGE, 48, seed=1)
    last = query[requests, -query_len:]
    return latent_attention(
        last.flatten(0, 1), cache, TABLES[requests], int32(*(LENGTHS[r] for r in requests)),
        int32(*range(0, len(last) * query_len + 1, query_len)), None, query_len, splits, 32, 0.2, True, True,
    ).unflatten(0, last.shape[:2])  # fmt: skip


CASES = {
    "paged": (paged, 64),
    "paged in a window": (lambda *args: paged(*args[:3], 1, window=40), 64),
    "latent": (latent, 48),
}


@pytest.mark.parametrize("op", CASES)
def test_attention_of_token_alone_matches_batch_bits(op):
    attend, dim = CASES[op]
    query = noise(len(LENGTHS), QUERY, 4, dim)
    everyone = list(range(len(LENGTHS)))
    together = attend(query, everyone, QUERY, SPLITS)
    for request in everyone:
        assert torch.equal(attend(query, [request], QUERY, SPLITS)[0], together[request])
        assert torch.equal(attend(query, [request], 1, SPLITS)[0], together[request, -1:])


@pytest.mark.parametrize("op", ["paged", "latent"])
def test_extra_or_missing_splits_lose_no_token(op):
    attend, dim = CASES[op]
    query = noise(len(LENGTHS), QUERY, 4, dim)
    fewer, right, more = (attend(query, [0, 1, 2], QUERY, splits) for splits in (SPLITS - 1, SPLITS, SPLITS + 5))
    assert torch.equal(right, more)
    torch.testing.assert_close(fewer, right, rtol=1e-4, atol=1e-5)


def test_sparse_list_alone_has_same_bits_and_tile(monkeypatch):
    tile_config, tiles = sparse.tile_config, []
    monkeypatch.setattr(sparse, "tile_config", lambda *sizes: tiles.append(sizes) or tile_config(*sizes))
    cache, lists, query = noise(40, 8, 64), whole(0, 320, 6, 30).int(), noise(6, 20, 64, seed=2)

    def attend(tokens):
        lens = torch.full_like(lists[tokens, 0], 30)
        return sparse.sparse_attention(query[tokens], cache, lists[tokens], lens, None, 8, 0.2, True)

    assert torch.equal(attend(slice(0, 6))[4:5], attend(slice(4, 5))) and tiles[0] == tiles[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 300), (16, 64), (1, 1)])
def test_linear_is_right_and_row_alone_matches_bits(outputs, inputs, dtype):
    x, weight = noise(70, 2, inputs, dtype=dtype) / 2, noise(2, outputs, inputs, seed=1, dtype=dtype) / 2
    found = batch_invariant_linear(x, weight)
    wanted = torch.einsum("tbk,bnk->tbn", x.double(), weight.double())
    tolerance = 2e-2 if dtype.itemsize == 2 else 1e-4
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * inputs**0.5 / 10)
    for row in (0, 15, 16, 63, 64, 69):
        assert torch.equal(batch_invariant_linear(x[row : row + 1], weight)[0], found[row])


def test_sorted_rows_match_product_with_one_weight():
    rows, weight, ends = noise(9, 1, 50), noise(4, 20, 50, seed=1), int32(2, 2, 7, 9)
    found = batch_invariant_linear(rows, weight, ends)
    used = [0, 0, 2, 2, 2, 2, 2, 3, 3]
    for row, index in enumerate(used):
        alone = batch_invariant_linear(rows[row : row + 1], weight[index : index + 1])
        assert torch.equal(found[row : row + 1], alone)
