import pytest
import torch

from attn_backends.kernels.latent_attention import LatentAttentionArguments, latent_attention
from tests.ops.attention import LATENT_BATCHES, latent

TILES = {
    "one row each": {"BLOCK_M": 16, "BLOCK_N": 32},
    "several tokens each": {"BLOCK_M": 32, "BLOCK_N": 64},
    "more rows than there are": {"BLOCK_M": 64, "BLOCK_N": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 6, 64])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_latent_attention_in_every_tile(tile, page_size):
    arguments = LatentAttentionArguments(*latent(LATENT_BATCHES[1], page_size=page_size))
    torch.testing.assert_close(arguments.launch(tile), arguments.reference(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_a_latent_of_nan_makes_nan_of_the_request_that_sees_it_and_of_no_other(splits):
    query, cache, table, *rest = latent(([1, 1, 1], [66, 66, 34], 4), splits)
    cache[table[0, 0], 3] = cache[table[2, 8], 1] = torch.nan
    found = latent_attention(query, cache, table, *rest).isnan()
    assert found[[0, 2]].all() and not found[[1, 3]].any()
