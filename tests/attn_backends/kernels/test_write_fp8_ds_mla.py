"""Latents in fp8_ds_mla, bit by bit."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from attn_backends.kernels.fp8_ds_mla import gather_and_dequantise, page_bytes, quantise_and_insert
from attn_backends.kernels.write_fp8_ds_mla import write_fp8_ds_mla
from attn_backends.kernels.write_latent import write_latent
from builders import BatchError
from tests.attn_backends.kernels.test_write_latent import make_norm, noise

NOPE = 448

# The format once more, from its description alone: a token's bytes in plain Python.

E4M3 = [(code & 7) / 512 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7) for code in range(127)]
"""The values of the codes 0 .. 126; code 127 is NaN."""


def e4m3(value):
    """The code of the nearest value, of two the even one."""
    size = abs(value)
    code = min(range(127), key=lambda code: (abs(E4M3[code] - size), code % 2))
    return code | (0x80 if math.copysign(1, value) < 0 else 0)


def token_bytes(row):
    """The 576 data bytes and 8 scale bytes of a latent that is exact in bfloat16."""
    data, scales = [], []
    for start in range(0, NOPE, 64):
        tile = row[start : start + 64]
        amax = max(1e-4, max(abs(x) for x in tile))
        exponent = next(e for e in range(-127, 128) if amax <= 448 * 2.0**e)
        data += [e4m3(x / 2.0**exponent) for x in tile]
        scales.append(exponent + 127)
    for x in row[NOPE:]:
        data += struct.pack("<f", x)[2:]
    return data, [*scales, 0]


def quantised_by_hand(latent, cache, slots, page_size):
    pages = cache.tolist()
    for row, slot in zip(latent.double().tolist(), slots, strict=True):
        if slot >= 0:
            page, offset = divmod(slot, page_size)
            data, scales = token_bytes(row)
            pages[page][offset * 576 : (offset + 1) * 576] = data
            start = page_size * 576 + offset * 8
            pages[page][start : start + 8] = scales
    return torch.tensor(pages, dtype=torch.uint8)


def hard_latents():
    """Rows around every decision of the packing, exact in bfloat16."""
    ties = [(E4M3[code] + E4M3[code + 1]) / 2 for code in range(126)]
    beside = [tie * (1 + sign / 128) for tie in ties[8:] for sign in (-1, 1)]
    around_powers = [448 * 2.0**e * (1 + step / 128) for e in (-30, -22, -21, -8, 0, 1, 100) for step in (-1, 0, 2)]
    first_of_tiles = torch.zeros(3, 512, dtype=torch.float64)
    first_of_tiles[:, :NOPE:64] = torch.tensor(around_powers, dtype=torch.float64).view(3, 7)
    decided = torch.zeros(4, 512, dtype=torch.float64)
    decided[:, :NOPE:64] = 448
    for row, values in enumerate([ties, [-t for t in ties], beside[:180], beside[180:]]):
        free = [dim for dim in range(NOPE) if dim % 64]
        decided[row, free[: len(values)]] = torch.tensor(values, dtype=torch.float64)
    zeros = torch.zeros(2, 512, dtype=torch.float64)
    zeros[1] = -0.0
    scales = torch.logspace(-9, 30, 6, dtype=torch.float64)[:, None]
    return torch.cat([first_of_tiles, decided, zeros, noise(6, 512).double() * scales]).bfloat16()


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_fp8_ds_mla_latents_match_reference_bits(page_size):
    latent = hard_latents()
    slots = [-1 if token % 6 == 5 else 3 * token + 1 for token in range(len(latent))]
    cache = torch.full((max(slots) // page_size + 2, page_bytes(page_size)), 0xAB, dtype=torch.uint8)
    expected = quantised_by_hand(latent, cache, slots, page_size)
    write_fp8_ds_mla(latent, cache, torch.tensor(slots), page_size=page_size)
    assert torch.equal(cache, expected)


def test_normed_latent_is_quantised_after_rounding():
    latent, slots, norm = noise(4, 512), torch.tensor([5, 0, 63, 17]), make_norm(512, 64, [0, 39, 7, 11])
    rows, pages = torch.zeros(1, 64, 512).bfloat16(), torch.zeros(1, page_bytes(64), dtype=torch.uint8)
    write_latent(latent, rows, slots, norm_rope=norm)
    expected = quantised_by_hand(rows[0, slots], pages, slots.tolist(), 64)
    write_fp8_ds_mla(latent, pages, slots, page_size=64, norm_rope=norm)
    assert torch.equal(pages, expected)


CAST_TO_NAN = pytest.mark.xfail(
    torch.full((9,), math.inf).to(torch.float8_e4m3fn).float().isnan().any().item(),
    reason="this torch casts infinity to NaN on a CPU, as 2.9 to 2.11 do",
    strict=True,
)


@pytest.mark.parametrize("bad", [math.nan, *(pytest.param(inf, marks=CAST_TO_NAN) for inf in (math.inf, -math.inf))])
def test_fp8_ds_mla_cache_keeps_nan_and_infinity(bad):
    latent = noise(1, 512)
    latent[0, 70] = bad
    cache = torch.zeros(1, page_bytes(4), dtype=torch.uint8)
    write_fp8_ds_mla(latent, cache, torch.tensor([2]), page_size=4)
    found = gather_and_dequantise(cache, torch.tensor([2]), 4)[0, 70]
    assert found.isnan() if math.isnan(bad) else found == bad


REFUSED = {
    "another page size": ({"page_size": 8}, r"the fp8_ds_mla cache must be torch.uint8 \[None, 5184\]"),
    "latents of another dim": ({"latent": noise(2, 576)}, r"latent must be torch.bfloat16 \[2, 512\]"),
    "latents in fp32": ({"latent": noise(2, 512).float()}, "latent must be torch.bfloat16"),
    "a cache of numbers": ({"cache": torch.zeros(5, page_bytes(4)).bfloat16()}, "must be torch.uint8"),
    "bytes apart": ({"cache": torch.zeros(5, 2 * page_bytes(4), dtype=torch.uint8)[:, ::2]}, "must be adjacent"),
    "too few slots": ({"slot_mapping": torch.tensor([0])}, r"slot_mapping must be torch.int64 \[2\]"),
    "too few positions": ({"norm_rope": make_norm(512, 64, [0])}, "positions must be"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_tensor_that_does_not_fit_is_refused_with_nothing_written(change, message):
    cache = torch.zeros(5, page_bytes(4), dtype=torch.uint8)
    given = {"latent": noise(2, 512), "cache": cache, "slot_mapping": torch.tensor([0, 1]), "page_size": 4, **change}
    with pytest.raises(BatchError, match=message):
        write_fp8_ds_mla(**given)
    assert not given["cache"].any()


@pytest.mark.parametrize("slot", [-1, 8, 2**31 - 1, -2, -(2**31)])
def test_fp8_ds_mla_skips_slots_outside_cache(slot):
    cache, slots = torch.zeros(2, page_bytes(4), dtype=torch.uint8), torch.tensor([slot, 7])
    quantise_and_insert(noise(2, 512), cache, slots, 4)
    found = gather_and_dequantise(cache, slots, 4)
    assert found[0].eq(0).all() and found[1].ne(0).any() and not cache[0].any()
