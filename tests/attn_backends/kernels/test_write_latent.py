"""Latents in the cache: rows anywhere, normed and rotated, and in fp8_ds_mla, bit by bit."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from attn_backends.kernels.fp8_ds_mla import gather_and_dequantise, page_bytes, quantise_and_insert
from attn_backends.kernels.write_latent import KvANormRope, write_latent
from builders import BatchError

NOPE, ROPE = 448, 64
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5}}
"""Of bfloat16 one step, since a sum in another order may tip the rounding."""


def noise(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_norm(dim, rotary, positions, dtype=torch.bfloat16):
    angles = torch.arange(40)[:, None] * 0.7 ** torch.arange(rotary // 2)
    return KvANormRope(
        weight=1 + noise(dim, dtype=dtype, seed=1) / 4,
        eps=1e-6,
        positions=torch.tensor(positions),
        table=torch.cat([angles.cos(), angles.sin()], 1),
    )


def normed(latent, norm):
    """In fp64, with a pair of dims as one complex number."""
    rows = []
    for row, position in zip(latent.double().tolist(), norm.positions.tolist(), strict=True):
        root = math.sqrt(sum(x * x for x in row) / len(row) + norm.eps)
        row = [x / root * w for x, w in zip(row, norm.weight.tolist(), strict=True)]
        rotary = norm.table.shape[1]
        start, angles = len(row) - rotary, norm.table[position].tolist()
        for pair in range(rotary // 2):
            at = start + 2 * pair
            turned = complex(row[at], row[at + 1]) * complex(angles[pair], angles[pair + rotary // 2])
            row[at : at + 2] = turned.real, turned.imag
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


# The fp8_ds_mla format once more, from its description alone: a token's bytes in plain Python.

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 512, 576, 80])
def test_a_latent_is_stored_at_its_page_and_offset_and_nowhere_else(dim, dtype):
    latent, cache = noise(3, dim, dtype=dtype), noise(5, 4, dim, dtype=dtype, seed=1)
    expected = cache.clone()
    expected[2, 1], expected[0, 3] = latent[0], latent[2]
    write_latent(latent, cache, torch.tensor([9, -1, 3]))
    assert torch.equal(cache, expected)


def test_caches_and_new_latents_may_be_views():
    projection, whole = noise(1, 100), torch.zeros(4, 5, 2, 80, dtype=torch.bfloat16)
    write_latent(projection[:, 20:84], whole[:, :, 1:, 8:72].transpose(0, 1), torch.tensor([6]))
    assert torch.equal(whole[2, 1, 1, 8:72], projection[0, 20:84])
    assert whole.count_nonzero() == projection[0, 20:84].count_nonzero()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("dim", "rotary"), [(512, 64), (576, 64), (64, 64), (80, 16), (64, 6)])
def test_a_normed_latent_is_what_the_formula_gives_in_fp64(dim, rotary, dtype):
    latent, norm = noise(4, dim, dtype=dtype) * 3, make_norm(dim, rotary, [0, 39, 7, 11], dtype)
    cache = torch.zeros(2, 4, dim, dtype=dtype)
    write_latent(latent, cache, torch.tensor([0, 1, 2, 5]), norm_rope=norm)
    torch.testing.assert_close(cache.flatten(0, 1)[[0, 1, 2, 5]].double(), normed(latent, norm), **CLOSE[dtype])


def test_a_normed_latent_is_rounded_once():
    latent = noise(64, 512)
    norm = make_norm(512, 64, list(range(32)) * 2)
    cache = torch.zeros(1, 64, 512, dtype=torch.bfloat16)
    write_latent(latent, cache, torch.arange(64), norm_rope=norm)
    agree = cache[0] == normed(latent, norm).bfloat16()
    assert agree.double().mean() > 0.999


def test_a_token_without_a_slot_may_hold_any_position_and_content():
    latent, norm = noise(3, 64), make_norm(64, 16, [3, 10**12, 5])
    latent[1] = math.nan
    caches = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16)
    write_latent(latent, caches[0], torch.tensor([0, -1, 2]), norm_rope=norm)
    write_latent(latent[[0, 2]], caches[1], torch.tensor([0, 2]), norm_rope=make_norm(64, 16, [3, 5]))
    assert torch.equal(caches[0], caches[1]) and caches.isfinite().all()


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_fp8_ds_mla_latents_are_those_quantised_by_hand_bit_by_bit(page_size):
    latent = hard_latents()
    slots = [-1 if token % 6 == 5 else 3 * token + 1 for token in range(len(latent))]
    cache = torch.full((max(slots) // page_size + 2, page_bytes(page_size)), 0xAB, dtype=torch.uint8)
    expected = quantised_by_hand(latent, cache, slots, page_size)
    write_latent(latent, cache, torch.tensor(slots), page_size=page_size)
    assert torch.equal(cache, expected)


def test_an_fp8_ds_mla_cache_may_be_seen_token_by_token():
    latent, slots = hard_latents(), torch.arange(15) + 9
    plain, seen = (torch.zeros(2, page_bytes(16), dtype=torch.uint8) for _ in range(2))
    write_latent(latent, plain, slots, page_size=16)
    view = seen.as_strided((2, 16, 1, 584), (page_bytes(16), 584, 584, 1))
    write_latent(latent, view, slots)
    assert torch.equal(seen, plain) and plain.any()


def test_a_normed_latent_is_quantised_from_its_rounded_row():
    latent, slots, norm = noise(4, 512), torch.tensor([5, 0, 63, 17]), make_norm(512, 64, [0, 39, 7, 11])
    rows, pages = torch.zeros(1, 64, 512).bfloat16(), torch.zeros(1, page_bytes(64), dtype=torch.uint8)
    write_latent(latent, rows, slots, norm_rope=norm)
    expected = quantised_by_hand(rows[0, slots], pages, slots.tolist(), 64)
    write_latent(latent, pages, slots, page_size=64, norm_rope=norm)
    assert torch.equal(pages, expected)


CAST_TO_NAN = pytest.mark.xfail(
    torch.full((9,), math.inf).to(torch.float8_e4m3fn).float().isnan().any().item(),
    reason="this torch casts infinity to NaN on a CPU, as 2.9 to 2.11 do",
    strict=True,
)


@pytest.mark.parametrize("bad", [math.nan, *(pytest.param(inf, marks=CAST_TO_NAN) for inf in (math.inf, -math.inf))])
def test_nan_and_infinity_survive_an_fp8_ds_mla_cache(bad):
    latent = noise(1, 512)
    latent[0, 70] = bad
    cache = torch.zeros(1, page_bytes(4), dtype=torch.uint8)
    write_latent(latent, cache, torch.tensor([2]), page_size=4)
    found = gather_and_dequantise(cache, torch.tensor([2]), 4)[0, 70]
    assert found.isnan() if math.isnan(bad) else found == bad


PLAIN = {"latent": noise(2, 64), "cache": torch.zeros(5, 4, 64, dtype=torch.bfloat16), "slots": torch.tensor([0, 1])}
BYTES = {**PLAIN, "latent": noise(2, 512), "cache": torch.zeros(5, page_bytes(4), dtype=torch.uint8)}
REFUSED = {
    "a cache of another dtype": (PLAIN, {"latent": noise(2, 64).float()}, "cache must be torch.float32"),
    "a cache of another dim": (PLAIN, {"latent": noise(2, 80)}, r"cache must be torch.bfloat16 \[None, None, 80\]"),
    "another page size": (PLAIN, {"page_size": 8}, r"cache must be torch.bfloat16 \[None, 8, 64\]"),
    "a cache of two heads": (PLAIN, {"cache": torch.zeros(5, 4, 2, 64, dtype=torch.bfloat16)}, "cache must be"),
    "a strided last dim": (
        PLAIN, {"cache": torch.zeros(5, 64, 4, dtype=torch.bfloat16).transpose(1, 2)}, "last dim .* must be contiguous",
    ),
    "too few slots": (PLAIN, {"slots": torch.tensor([0])}, r"slot_mapping must be torch.int64 \[2\]"),
    "slots of another dtype": (PLAIN, {"slots": torch.tensor([0, 1]).int()}, "slot_mapping must be torch.int64"),
    "slots apart": (PLAIN, {"slots": torch.tensor([0, 9, 1])[::2]}, "slot_mapping must be contiguous"),
    "a weight of numbers apart": (PLAIN, {"norm_rope": KvANormRope(
        weight=noise(128)[::2], eps=0.0, positions=torch.tensor([0, 1]), table=torch.zeros(8, 16))}, "weight must be"),
    "too few positions": (PLAIN, {"norm_rope": make_norm(64, 16, [0])}, "positions must be"),
    "a weight of another dim": (PLAIN, {"norm_rope": make_norm(80, 16, [0, 1])}, r"norm_rope.weight must be .* \[64\]"),
    "more rotary dims than dims": (PLAIN, {"norm_rope": KvANormRope(
        weight=noise(64), eps=0.0, positions=torch.tensor([0, 1]), table=torch.zeros(8, 80))}, "rotary table"),
    "fp8_ds_mla without a page size": (BYTES, {}, "page_size None"),
    "fp8_ds_mla with another page size": (BYTES, {"page_size": 8}, "its tokens could not be found"),
    "fp8_ds_mla from another dim": (BYTES, {"page_size": 4, "latent": noise(2, 576)}, r"\[2, 512\]"),
    "fp8_ds_mla from fp32": (BYTES, {"page_size": 4, "latent": noise(2, 512).float()}, "latent must be torch.bfloat16"),
    "fp8_ds_mla tokens apart": (BYTES, {"cache": torch.zeros(5, 4, 1, 600, dtype=torch.uint8)[..., :584]}, "adjacent"),
}  # fmt: skip


@pytest.mark.parametrize(("base", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_tensor_that_a_kernel_would_misread_is_refused_with_nothing_written(base, change, message):
    args = {**base, **change}
    latent, cache, slots = (args.pop(name) for name in ("latent", "cache", "slots"))
    with pytest.raises(BatchError, match=message):
        write_latent(latent, cache, slots, **args)
    assert not cache.any()


@pytest.mark.parametrize("slot", [-1, 8, 2**31 - 1, -2, -(2**31)])
def test_slots_outside_of_an_fp8_ds_mla_cache_are_neither_written_nor_read(slot):
    cache, slots = torch.zeros(2, page_bytes(4), dtype=torch.uint8), torch.tensor([slot, 7])
    quantise_and_insert(noise(2, 512), cache, slots, 4)
    found = gather_and_dequantise(cache, slots, 4)
    assert found[0].eq(0).all() and found[1].ne(0).any() and not cache[0].any()
