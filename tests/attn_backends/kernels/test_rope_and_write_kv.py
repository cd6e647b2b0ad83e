"""Rope and the KV write as one op, compared with a float64 rotation and a separate write."""

import pytest
import torch

from attn_backends import KVCache
from attn_backends.kernels.rope import Rope, apply_rope
from attn_backends.kernels.rope_and_write_kv import rope_and_write_kv
from attn_backends.kernels.write_kv import write_kv
from builders import BatchError
from spec_decode.testing.layouts import scales_of
from tests.factories import CPU, indexes_fp8, make_cache, make_spec

TOKENS, MAX_POSITIONS = 4, 40
SLOTS = torch.tensor([7, -1, 19, 0])
POSITIONS = torch.tensor([3, 39, 0, 17])


def rope_of(dim):
    angle = torch.arange(MAX_POSITIONS)[:, None] * 100.0 ** -(torch.arange(dim // 2) / (dim // 2))
    return Rope(POSITIONS, torch.cat([angle.cos(), angle.sin()], -1))


def packed_of(spec):
    """A projection of queries, keys and values amid NaN, and the three views of it."""
    heads = [spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads]
    whole = torch.full((TOKENS, sum(heads) + 2, spec.head_dim), torch.nan, dtype=spec.dtype)
    packed = whole[:, 1:-1]
    packed.copy_(torch.randn(packed.shape, generator=torch.Generator().manual_seed(0)))
    return whole, packed.split(heads, 1)


def rotated(x):
    """x by the plane rotations themselves, as complex numbers in float64."""
    rope = rope_of(x.shape[-1])
    cos, sin = rope.table[POSITIONS].double().chunk(2, -1)
    first, second = x.double().chunk(2, -1)
    product = torch.complex(first, second) * torch.complex(cos, sin)[:, None]
    return torch.cat([product.real, product.imag], -1)


SPECS = {
    "a group of four": {"num_q_heads": 8, "num_kv_heads": 2},
    "a group of three": {"num_q_heads": 9, "num_kv_heads": 3},
    "as many queries as keys": {"num_q_heads": 2, "num_kv_heads": 2},
    "one key of odd half": {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 24},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", SPECS.values(), ids=SPECS)
def test_rope_and_write_rotates_queries_and_stores_keys(sizes, dtype):
    spec = make_spec(**sizes, dtype=dtype)
    cache, (whole, (query, key, value)) = make_cache(spec, 5), packed_of(spec)
    before, projected = KVCache(cache.key.clone(), cache.value.clone()), whole.clone()
    queries, keys = rotated(query), rotated(key)

    rope_and_write_kv(query, key, value, rope_of(spec.head_dim), cache.key, cache.value, SLOTS)

    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
    written = SLOTS >= 0
    slots = SLOTS[written]
    torch.testing.assert_close(query.double(), queries, **close)
    torch.testing.assert_close(cache.key.flatten(0, 1)[slots].double(), keys[written], **close)
    assert torch.equal(cache.value.flatten(0, 1)[slots], value[written])
    others = [slot for slot in range(cache.key.shape[0] * cache.key.shape[1]) if slot not in slots.tolist()]
    for now, was in ((cache.key, before.key), (cache.value, before.value)):
        assert torch.equal(now.flatten(0, 1)[others], was.flatten(0, 1)[others])
    rest = slice(1 + spec.num_q_heads, None)
    assert torch.equal(whole[:, rest].nan_to_num(), projected[:, rest].nan_to_num()) and whole[:, 0].isnan().all()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="its own dtype"),
        pytest.param({"kv_dtype": torch.float8_e4m3fn}, id="e4m3", marks=indexes_fp8),
        pytest.param({"kv_dtype": torch.float8_e4m3fn, "head_scales": True}, id="e4m3 by head", marks=indexes_fp8),
        pytest.param({"value_dim": 40}, id="a value dim of its own"),
    ],
)
@pytest.mark.parametrize("slots", [SLOTS, *(torch.tensor([slot, 7, -1, slot]) for slot in (20, 2**40, -2, -(2**40)))])
def test_fused_rope_write_matches_two_ops(changes, slots):
    """In the middle of a larger storage, where a stray write would be seen."""
    spec = make_spec(dtype=torch.float16, **changes)
    rope, (_, parts), (_, others) = rope_of(16), packed_of(spec), packed_of(spec)
    value = torch.randn(TOKENS, 2, spec.out_dim, generator=torch.Generator().manual_seed(1)).half()
    found, wanted = (torch.zeros(9, 4, 2, spec.head_dim + 1 + spec.out_dim).to(spec.cache_dtype) for _ in range(2))

    scales = scales_of(spec, CPU)
    both = (scales.key, scales.value) if scales else None

    rope_and_write_kv(*parts[:2], value, rope, found[2:7, ..., :16], found[2:7, ..., 17:], slots, both)
    write_kv(apply_rope(others[1], rope), value, wanted[2:7, ..., :16], wanted[2:7, ..., 17:], slots, both)
    apply_rope(others[0], rope)
    assert torch.equal(parts[0], others[0]) and not torch.equal(parts[1], others[1])
    assert torch.equal(found.float(), wanted.float())
    assert found.float().count_nonzero() == int(((slots >= 0) & (slots < 20)).sum()) * 2 * (16 + spec.out_dim)


MISFITS = {
    "dims apart": ({"x": torch.ones(TOKENS, 16, 2).mT}, "even number of contiguous dims"),
    "half a pair": (
        {"x": torch.ones(TOKENS, 2, 5), "table": torch.ones(MAX_POSITIONS, 5)},
        "even number of contiguous dims",
    ),
    "a strided table": ({"table": torch.ones(MAX_POSITIONS, 32)[:, ::2]}, "got 16 with strides .* table"),
    "a wider table": ({"table": torch.ones(MAX_POSITIONS, 32)}, "the rotary table must be"),
    "positions of 32 bits": ({"positions": POSITIONS.int()}, "positions must be"),
    "positions apart": ({"positions": POSITIONS.repeat_interleave(2)[::2]}, "positions must be contiguous"),
}


@pytest.mark.parametrize(("changes", "message"), MISFITS.values(), ids=MISFITS)
def test_misread_heads_rejected_before_rotation(changes, message):
    given = {"x": torch.ones(TOKENS, 2, 16), "positions": POSITIONS, "table": rope_of(16).table, **changes}
    with pytest.raises(BatchError, match=message):
        apply_rope(given["x"], Rope(given["positions"], given["table"]))
    assert given["x"].eq(1).all()
