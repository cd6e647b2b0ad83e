import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_backends.kernels import fp8_ds_mla, sparse_attention
from attn_backends.kernels.fp8_ds_mla import page_bytes
from builders.devices import Room
from builders.errors import BatchError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def e4m3(code):
    """The values of e4m3 codes, fp64, from the format's definition: 4 exponent bits of bias 7, 3 mantissa bits."""
    exponent, mantissa = code >> 3 & 15, (code & 7).double()
    size = torch.where(exponent == 0, mantissa * 2**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    return torch.where(code & 127 == 127, math.nan, torch.where(code >= 128, -size, size))


def latent(cache, slot, page_size):
    """One latent of a cache of either form, fp64 [D], read byte by byte."""
    page, offset = cache[slot // page_size], slot % page_size
    if cache.dtype != torch.uint8:
        return page[offset].double()
    data = page[576 * offset : 576 * (offset + 1)]
    exponents = page[576 * page_size + 8 * offset :][:7].double()
    nope = e4m3(data[:448].long()) * (2.0 ** (exponents - 127)).repeat_interleave(64)
    return torch.cat([nope, data[448:].view(BF16).double()])


class SparseCase:
    """A call of the op over lists of random slots; every slot that is not listed, and every entry behind, is poison."""

    def __init__(self, lens=(5, 3, 0), *, dtype=FP32, dim=64, heads=3, fp8=False, page_size=4, sinks=True, seed=1):
        self.rng = torch.Generator().manual_seed(seed)
        tokens = len(lens)
        self.query = torch.randn(tokens, heads, dim, generator=self.rng).to(dtype)
        self.sinks = torch.randn(heads, generator=self.rng) if sinks else None
        self.scale = 3 * dim**-0.5
        self.batch_invariant = False
        self.page_size, self.lens = page_size, torch.tensor(lens, dtype=torch.int32)
        self.fill(lens, page_size, fp8)

    def fill(self, lens, page_size, fp8):
        tokens, dim, width = len(lens), self.query.shape[2], max(lens) + 2
        pages = -(-tokens * width // page_size) + 1
        slots = torch.randperm(pages * page_size, generator=self.rng)[: tokens * width].view(tokens, width)
        entry = torch.arange(width)
        live = entry < torch.tensor(lens)[:, None]
        slots[live & (torch.rand(tokens, width, generator=self.rng) < 0.2)] = -1
        values = torch.randn(int(live.sum()), dim, generator=self.rng).to(self.query.dtype)
        if fp8:
            cache = torch.full((pages, page_bytes(page_size)), 0xFF, dtype=torch.uint8)
            fp8_ds_mla.quantise_and_insert(values, cache, slots[live], page_size)
        else:
            cache = torch.full((pages, page_size, dim), math.nan, dtype=self.query.dtype)
            used = slots[live] >= 0
            cache.view(-1, dim)[slots[live][used]] = values[used]
        slots[~live] = 2**31 - 1
        self.cache, self.indices = cache, slots.int()

    def run(self, **change):
        names = sparse_attention.SparseAttentionArguments._fields
        return sparse_attention.sparse_attention(*(change.get(name, getattr(self, name)) for name in names))

    def truth(self):
        return torch.stack([self._token(token) for token in range(self.query.shape[0])])

    def _token(self, token):
        slots = self.indices[token, : self.lens[token]].tolist()
        latents = [latent(self.cache, slot, self.page_size) for slot in slots if slot >= 0]
        query = self.query[token].double()
        if not latents:
            return torch.zeros_like(query)
        keys = torch.stack(latents)
        weights = torch.exp(self.scale * query @ keys.T)
        total = weights.sum(1) + (0.0 if self.sinks is None else self.sinks.double().exp())
        return weights @ keys / total[:, None]

    def check(self):
        rounding = {FP32: 1e-5, FP16: 2**-10, BF16: 2**-7}[self.query.dtype]
        torch.testing.assert_close(self.run().double(), self.truth(), rtol=rounding, atol=1e-5)


FP8 = {"dtype": BF16, "dim": 512, "fp8": True}
CASES = {
    "float32": {},
    "bfloat16": {"dtype": BF16, "dim": 512},
    "float16": {"dtype": FP16, "dim": 256},
    "no sinks": {"sinks": False},
    "one head": {"heads": 1, "dim": 128},
    "one-token pages": {"page_size": 1},
    "fp8_ds_mla": FP8,
    "fp8_ds_mla, no sinks": {**FP8, "sinks": False},
    "fp8_ds_mla, pages with padding": {**FP8, "page_size": 73},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sparse_attention_matches_listed_latents(case):
    SparseCase(**case).check()


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_empty_list_gives_zeros_despite_nan_query(sinks):
    inputs = SparseCase((0, 4, 3), sinks=sinks)
    inputs.query[0] = inputs.query[2] = math.nan
    inputs.indices[2, :3] = -1
    assert inputs.run().ne(0).any((1, 2)).tolist() == [False, True, False]


def test_infinite_sinks_zero_output_or_have_no_effect():
    inputs = SparseCase((5, 0))
    out, bare = inputs.run(sinks=torch.tensor([math.inf, -math.inf, 0.0])), inputs.run(sinks=None)
    assert out[:, 0].eq(0).all() and torch.equal(out[:, 1], bare[:, 1]) and out[1].eq(0).all()


def test_a_slot_listed_twice_counts_twice():
    inputs = SparseCase((2,), sinks=False)
    inputs.indices[0, :2] = int(inputs.indices[0, :2].max())
    inputs.check()


@pytest.mark.parametrize("form", [{}, FP8], ids=["plain", "fp8_ds_mla"])
def test_cache_view_is_read_and_outside_entry_skipped(form):
    inputs = SparseCase((5, 3), **form)
    inputs.indices[0, 2] = -1
    skipped, more = inputs.run(), torch.stack([inputs.cache, inputs.cache.flip(0)], 1)
    assert torch.equal(inputs.run(cache=more[:, 0]), skipped)
    inputs.indices[0, 2] = inputs.cache.shape[0] * inputs.page_size
    assert torch.equal(inputs.run(), skipped)


def shifted(pages):
    return torch.zeros(len(pages), pages.shape[1] + 8, dtype=torch.uint8)[:, : pages.shape[1]]


REFUSED = {
    "a latent dim that no tile fits": (
        {}, {"query": lambda x: torch.zeros(3, 3, 96)}, "must be one of (64, 128, 256, 512), got 96",
    ),
    "a cache of another dtype": (
        {}, {"cache": torch.Tensor.half}, "the latent cache must be torch.float32 [None, 4, 64]",
    ),
    "another page size": ({}, {"page_size": lambda x: 2}, "the latent cache must be torch.float32 [None, 2, 64]"),
    "fp8_ds_mla pages of other bytes": (
        FP8, {"page_size": lambda x: 5}, f"the latent cache must be torch.uint8 [None, {page_bytes(5)}]",
    ),
    "fp8_ds_mla for a query of another dtype": (
        FP8, {"query": torch.Tensor.half},
        "an fp8_ds_mla cache serves bfloat16 queries of dim 512, got torch.float16 of dim 512;",
    ),
    "fp8_ds_mla pages that start anywhere": (FP8, {"cache": shifted}, "must start at a multiple of 16 bytes"),
    "strided latents": (
        {}, {"cache": lambda x: x.repeat(1, 1, 2)[..., ::2]}, "the latent cache must be contiguous in its last dim",
    ),
    "indices of another dtype": ({}, {"indices": torch.Tensor.long}, "indices must be torch.int32 [3, None]"),
    "lists with gaps": ({}, {"indices": lambda x: x[:, ::2]}, "indices must be contiguous along a row"),
    "too few lens": ({}, {"lens": lambda x: x[:2]}, "lens must be torch.int32 [3]"),
    "lens apart": ({}, {"lens": lambda x: x.repeat_interleave(2)[::2]}, "lens must be contiguous"),
    "sinks apart": ({}, {"sinks": lambda x: x.repeat_interleave(2)[::2]}, "sinks must be contiguous"),
    "sinks of another dtype": ({}, {"sinks": torch.Tensor.half}, "sinks must be torch.float32 [3]"),
}  # fmt: skip


@pytest.mark.parametrize(("form", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_misread_sparse_inputs_raise_batch_error(form, changes, message):
    inputs = SparseCase(**form)
    with pytest.raises(BatchError) as refused:
        inputs.run(**{name: change(getattr(inputs, name)) for name, change in changes.items()})
    assert message in str(refused.value)


@given(st.integers(1, 5000), st.integers(1, 256), st.sampled_from([2, 4]), st.integers(1, 5000))
def test_sparse_tile_fits_lists_and_tensor_cores(tokens, heads, element_size, width):
    tile = sparse_attention.tile_config(tokens, heads, element_size, width, Room(132, 232448), False)
    if tile["TOKENS_FIRST"]:
        assert width <= tile["BLOCK_N"]
    rows = tile["BLOCK_N" if tile["TOKENS_FIRST"] else "BLOCK_M"]
    assert rows >= 64 or element_size == 4
    assert (tile["BLOCK_M"] + tile["BLOCK_N"]) * 512 * element_size <= 200 * 1024


def test_page_bytes_are_multiples_of_token_data():
    assert [page_bytes(size) for size in (1, 64, 72, 73, 256)] == [1152, 37440, 42048, 43200, 149760]


def test_every_fp8_code_dequantises_to_its_value():
    cache = torch.randint(0, 256, (6, page_bytes(3)), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    cache[:, 3 * 576 :] = cache[:, 3 * 576 :] % 100 + 77
    dequantised = fp8_ds_mla.gather_and_dequantise(cache, torch.arange(18), 3)
    expected = torch.stack([latent(cache, slot, 3) for slot in range(18)])
    torch.testing.assert_close(dequantised.double(), expected, rtol=0, atol=0, equal_nan=True)
