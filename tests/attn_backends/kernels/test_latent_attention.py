import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_backends.kernels.latent_attention import latent_attention, merge_warps, tile_config
from builders import BatchBuffers, BatchError
from tests.factories import make_tables

CASES = {
    "decode": {"query_lens": [1, 1, 1], "seq_lens": [1, 4, 17]},
    "ragged": {"query_lens": [1, 5, 3], "seq_lens": [9, 5, 21]},
    "verify": {"query_lens": [4, 4], "seq_lens": [4, 20]},
    "one-token pages": {"query_lens": [2, 1], "seq_lens": [7, 20], "page_size": 1},
    "pages of six": {"query_lens": [2, 1], "seq_lens": [7, 20], "page_size": 6},
    "six heads": {"query_lens": [2, 1], "seq_lens": [7, 20], "heads": 6},
    "wide": {"query_lens": [1, 2], "seq_lens": [3, 9], "value_dim": 512, "rotary_dim": 64},
    "rotary wider than value": {"query_lens": [1, 2], "seq_lens": [3, 9], "value_dim": 16, "rotary_dim": 32},
    "scale": {"query_lens": [1, 2], "seq_lens": [3, 9], "scale": 0.7},
}


class Asked:
    """A batch on a cache that is noise, with what attention over the logical tokens gives, in plain fp64."""

    def __init__(
        self, query_lens, seq_lens, *, page_size=4, heads=2, value_dim=32, rotary_dim=16, scale=0.2, pad_reqs=None
    ):
        generator = torch.Generator().manual_seed(1)
        self.tables = make_tables(seq_lens, page_sizes=(page_size,), max_reqs=4, max_seq_len=32)
        self.query_lens, self.seq_lens, self.value_dim, self.scale = query_lens, seq_lens, value_dim, scale
        self.batch = BatchBuffers(self.tables, max_tokens=64)
        self.num_reqs, tokens = self.batch.load(query_lens, seq_lens, pad_reqs=pad_reqs)
        dim = value_dim + rotary_dim
        self.cache = torch.randn(self.tables.num_pages[0], page_size, dim, generator=generator)
        self.query = torch.randn(tokens, heads, dim, generator=generator)

    def run(self):
        return latent_attention(
            self.query,
            self.cache,
            self.tables.block_tables[0, : self.num_reqs],
            self.batch.seq_lens[: self.num_reqs],
            self.batch.query_start_loc[: self.num_reqs + 1],
            tree_masks=None,
            max_query_len=max(self.query_lens),
            num_splits=2,
            value_dim=self.value_dim,
            scale=self.scale,
            causal=True,
            batch_invariant=False,
        )

    def where(self, request, position):
        size = self.cache.shape[1]
        return int(self.tables.block_tables[0, request, position // size]), position % size

    def truth(self):
        rows, token = [], 0
        for request, (query, seq) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            for position in range(seq - query, seq):
                latents = [self.cache[self.where(request, past)].double() for past in range(position + 1)]
                rows.append(torch.stack([self._one(head.double(), latents) for head in self.query[token]]))
                token += 1
        return torch.stack(rows)

    def _one(self, query, latents):
        weights = [math.exp(self.scale * float(query @ latent)) for latent in latents]
        return sum(
            (weight / sum(weights) * latent[: self.value_dim] for weight, latent in zip(weights, latents, strict=True)),
            torch.zeros(self.value_dim, dtype=torch.float64),
        )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_latent_attention_over_pages_is_attention_over_the_logical_tokens(case):
    asked = Asked(**case)
    torch.testing.assert_close(asked.run().double(), asked.truth(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_output_has_the_querys_dtype_and_its_accuracy(dtype):
    asked = Asked([1, 3], [9, 21])
    asked.cache, asked.query = asked.cache.to(dtype), asked.query.to(dtype)
    out = asked.run()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), asked.truth(), rtol=2**-8, atol=1e-6)


def test_padding_rows_of_latent_attention_come_out_as_zero():
    out = Asked([2, 2], [7, 20], pad_reqs=4).run()
    assert out[4:].eq(0).all() and out[:4].ne(0).any()


def test_no_latent_outside_a_requests_tokens_is_read():
    asked = Asked([1, 3], [6, 17])
    clean = asked.run()
    owned = torch.zeros(asked.cache.shape[:2], dtype=torch.bool)
    for request, length in enumerate(asked.seq_lens):
        for position in range(length):
            owned[asked.where(request, position)] = True
    asked.cache[~owned] = float("nan")
    assert torch.equal(asked.run(), clean)


def test_latents_may_be_strided():
    asked = Asked([1, 3], [6, 17])
    clean = asked.run()
    pages, size, dim = asked.cache.shape
    wider = torch.full((size + 1, pages, dim + 8), float("nan"))
    wider[:size, :, :dim] = asked.cache.transpose(0, 1)
    asked.cache = wider[:size, :, :dim].transpose(0, 1)
    assert torch.equal(asked.run(), clean)


def refusal(change):
    asked = Asked([1, 3], [6, 17])
    change(asked)
    with pytest.raises(BatchError) as refused:
        asked.run()
    return str(refused.value)


@pytest.mark.parametrize("value_dim", [0, 8, 24, 40, 48])
def test_dims_that_no_tile_covers_are_refused(value_dim):
    message = refusal(lambda asked: setattr(asked, "value_dim", value_dim))
    assert f"got {value_dim} and {48 - value_dim} of 48" in message


@pytest.mark.parametrize("dims", [(1024, 16), (16, 1024)])
def test_more_dims_than_a_multiprocessor_holds_are_refused(dims):
    with pytest.raises(BatchError, match=f"got {dims[0]} and {dims[1]} of 1040"):
        Asked([1], [3], value_dim=dims[0], rotary_dim=dims[1]).run()


def test_latents_of_another_dtype_are_refused():
    assert "torch.bfloat16" in refusal(lambda asked: setattr(asked, "cache", asked.cache.bfloat16()))


def test_latents_of_another_width_are_refused():
    assert "page_size, 48]" in refusal(lambda asked: setattr(asked, "cache", asked.cache[..., :40]))


def test_latents_whose_last_dim_is_strided_are_refused():
    assert "contiguous last dim" in refusal(
        lambda asked: setattr(asked, "cache", asked.cache.transpose(1, 2).contiguous().transpose(1, 2))
    )


DIMS = st.sampled_from([16, 32, 64, 128, 256, 512])


@given(rows=st.integers(1, 4096), value_dim=DIMS, rotary_dim=DIMS, element_size=st.sampled_from([2, 4]))
def test_a_tile_of_any_width_fits_a_hopper_multiprocessor(rows, value_dim, rotary_dim, element_size):
    dim = value_dim + rotary_dim
    config = tile_config(rows, dim, element_size)
    query, weights = config["BLOCK_M"] * dim, config["BLOCK_M"] * config["BLOCK_N"]
    # Triton keeps one buffer a stage for wgmma, which takes 64 rows or more, and one less for mma.
    latents = config["BLOCK_N"] * dim * (config["num_stages"] - (config["BLOCK_M"] < 64))
    assert config["BLOCK_N"] >= 16
    assert (query + weights + latents) * element_size <= 232448


def test_latents_of_deepseek_v3_get_the_largest_tile():
    assert tile_config(128, 576, 2) == {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}


@given(splits=st.integers(2, 64), value_dim=st.sampled_from([16, 128, 512]))
def test_the_merge_holds_a_rows_parts_in_registers(splits, value_dim):
    warps = merge_warps(splits, value_dim)
    assert warps in (1, 2, 4, 8, 16)
    assert splits * value_dim <= warps * 32 * 64
