import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_backends.kernels.latent_attention import LatentAttentionArguments, merge_warps, tile_config
from builders import BatchError
from builders.devices import Room
from tests.ops.attention import latent

RIGHT = LatentAttentionArguments(*latent(([1, 3], [6, 17], None)))
"""Of 32 value dims and 16 rotary ones."""
CACHE = RIGHT.latent_cache
REFUSED = {
    **{f"{dim} value dims": ({"value_dim": dim}, f"got {dim} and {48 - dim} of 48") for dim in (0, 8, 24, 40, 48)},
    **{
        f"dims of {dims}": ({"query": torch.zeros(4, 6, 1040), "value_dim": dims[0]}, f"got {dims[0]} and {dims[1]} of")
        for dims in ((1024, 16), (16, 1024))
    },
    "latents of another dtype": ({"latent_cache": CACHE.bfloat16()}, "torch.bfloat16"),
    "latents of another width": ({"latent_cache": CACHE[..., :40]}, "page_size, 48]"),
    "a strided last dim": ({"latent_cache": CACHE.mT.contiguous().mT}, "contiguous last dim"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_misread_latents_raise_batch_error(change, message):
    with pytest.raises(BatchError) as refused:
        RIGHT._replace(**change).reference()
    assert message in str(refused.value)


ROOMS = [Room(132, 232448), Room(108, 166912, False, False), Room(72, 101376, False, False)]
DIMS = st.sampled_from([16, 32, 64, 128, 256, 512])


@given(
    rows=st.integers(1, 4096),
    dims=st.tuples(DIMS, DIMS).filter(lambda dims: sum(dims) <= 576),
    element_size=st.sampled_from([2, 4]),
    room=st.sampled_from(ROOMS),
)
def test_latent_tile_fits_shared_memory(rows, dims, element_size, room):
    dim = sum(dims)
    config = tile_config(rows, dim, element_size, room)
    query, weights = config["BLOCK_M"] * dim, config["BLOCK_M"] * config["BLOCK_N"]
    # Triton keeps one buffer a stage for wgmma, which takes 64 rows or more, and one less for mma.
    latents = config["BLOCK_N"] * dim * (config["num_stages"] - (config["BLOCK_M"] < 64))
    assert config["BLOCK_N"] >= 16
    assert config["BLOCK_M"] >= 16
    assert (query + weights + latents) * element_size <= room.shared_memory


@given(splits=st.integers(2, 64), value_dim=st.sampled_from([16, 128, 512]))
def test_merge_keeps_row_partials_in_registers(splits, value_dim):
    warps = merge_warps(splits, value_dim)
    assert warps in (1, 2, 4, 8, 16)
    assert splits * value_dim <= warps * 32 * 64
