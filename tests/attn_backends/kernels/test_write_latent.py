"""Latents in the cache: rows anywhere, normed and rotated."""

from __future__ import annotations

import math

import pytest
import torch

from attn_backends.kernels.write_latent import KvANormRope, write_latent
from builders import BatchError

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 512, 576, 80])
def test_write_latent_stores_at_slot_and_nowhere_else(dim, dtype):
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
def test_normed_latent_matches_fp64_formula(dim, rotary, dtype):
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


def test_token_without_slot_may_hold_anything():
    latent, norm = noise(3, 64), make_norm(64, 16, [3, 10**12, 5])
    latent[1] = math.nan
    caches = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16)
    write_latent(latent, caches[0], torch.tensor([0, -1, 2]), norm_rope=norm)
    write_latent(latent[[0, 2]], caches[1], torch.tensor([0, 2]), norm_rope=make_norm(64, 16, [3, 5]))
    assert torch.equal(caches[0], caches[1]) and caches.isfinite().all()


PLAIN = {"latent": noise(2, 64), "cache": torch.zeros(5, 4, 64, dtype=torch.bfloat16), "slots": torch.tensor([0, 1])}
REFUSED = {
    "a cache of another dtype": ({"latent": noise(2, 64).float()}, "cache must be torch.float32"),
    "a cache of another dim": ({"latent": noise(2, 80)}, r"cache must be torch.bfloat16 \[None, None, 80\]"),
    "a cache of two heads": ({"cache": torch.zeros(5, 4, 2, 64, dtype=torch.bfloat16)}, "cache must be"),
    "a strided last dim": (
        {"cache": torch.zeros(5, 64, 4, dtype=torch.bfloat16).transpose(1, 2)}, "last dim .* must be contiguous",
    ),
    "too few slots": ({"slots": torch.tensor([0])}, r"slot_mapping must be torch.int64 \[2\]"),
    "slots of another dtype": ({"slots": torch.tensor([0, 1]).int()}, "slot_mapping must be torch.int64"),
    "slots apart": ({"slots": torch.tensor([0, 9, 1])[::2]}, "slot_mapping must be contiguous"),
    "a weight of numbers apart": ({"norm_rope": KvANormRope(
        weight=noise(128)[::2], eps=0.0, positions=torch.tensor([0, 1]), table=torch.zeros(8, 16))}, "weight must be"),
    "too few positions": ({"norm_rope": make_norm(64, 16, [0])}, "positions must be"),
    "a weight of another dim": ({"norm_rope": make_norm(80, 16, [0, 1])}, r"norm_rope.weight must be .* \[64\]"),
    "more rotary dims than dims": ({"norm_rope": KvANormRope(
        weight=noise(64), eps=0.0, positions=torch.tensor([0, 1]), table=torch.zeros(8, 80))}, "rotary table"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_misread_write_latent_tensor_writes_nothing(change, message):
    args = {**PLAIN, **change}
    latent, cache, slots = (args.pop(name) for name in ("latent", "cache", "slots"))
    with pytest.raises(BatchError, match=message):
        write_latent(latent, cache, slots, **args)
    assert not cache.any()
