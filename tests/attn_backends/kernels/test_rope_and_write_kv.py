"""Rope and the KV write as one op, against rotation in float64 and a write of its own."""

from dataclasses import replace

import pytest
import torch

from attn_backends import KVCache
from attn_backends.kernels.rope import Rope, apply_rope
from attn_backends.kernels.rope_and_write_kv import rope_and_write_kv
from attn_backends.kernels.write_kv import write_kv
from tests.factories import indexes_fp8, make_cache, make_spec

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


def turned(x):
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
def test_queries_are_turned_in_place_and_turned_keys_and_values_stored(sizes, dtype):
    spec = make_spec(**sizes, dtype=dtype)
    cache, (whole, (query, key, value)) = make_cache(spec, 5), packed_of(spec)
    before, projected = KVCache(cache.key.clone(), cache.value.clone()), whole.clone()
    queries, keys = turned(query), turned(key)

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
    "kv_dtype",
    [pytest.param(None, id="its own dtype"), pytest.param(torch.float8_e4m3fn, id="e4m3", marks=indexes_fp8)],
)
def test_the_numbers_are_those_of_the_two_ops(kv_dtype):
    spec = make_spec(dtype=torch.float16)
    caches = [make_cache(replace(spec, kv_dtype=kv_dtype) if kv_dtype else spec, 5) for _ in range(2)]
    for cache in caches:
        cache.key.zero_()
        cache.value.zero_()
    (_, (query, key, value)), (_, (other, other_key, _)) = packed_of(spec), packed_of(spec)
    rope = rope_of(spec.head_dim)

    rope_and_write_kv(query, key, value, rope, caches[0].key, caches[0].value, SLOTS)
    write_kv(apply_rope(other_key, rope), value, caches[1].key, caches[1].value, SLOTS)
    apply_rope(other, rope)
    assert torch.equal(query, other)
    assert torch.equal(caches[0].key.float(), caches[1].key.float())
    assert torch.equal(caches[0].value.float(), caches[1].value.float())
    assert caches[0].key.float().count_nonzero() and not torch.equal(key, other_key)


def test_a_value_dim_of_its_own_and_strided_caches():
    spec = make_spec(value_dim=40)
    key, value = torch.randn(TOKENS, 2, 16), torch.randn(TOKENS, 2, 40)
    packed = torch.full((5, 4, 2, 60), torch.nan)
    caches = packed[..., :16], packed[..., 17:57]
    wanted = make_cache(spec, 5)

    rope_and_write_kv(torch.randn(TOKENS, 4, 16), key, value, rope_of(16), *caches, SLOTS)
    write_kv(apply_rope(key, rope_of(16)), value, wanted.key, wanted.value, SLOTS)

    for slot in SLOTS[SLOTS >= 0]:
        at = slot // 4, slot % 4
        assert torch.equal(caches[0][at], wanted.key[at]) and torch.equal(caches[1][at], wanted.value[at])
    assert packed.isfinite().sum() == 3 * 2 * (16 + 40)


@pytest.mark.parametrize("slot", [20, 2**40, -2, -(2**40)])
def test_a_slot_outside_of_the_cache_writes_nothing(slot):
    """In the middle of a larger storage, where a stray write would be seen."""
    storage, slots = torch.zeros(2, 9, 4, 2, 16), torch.tensor([slot, 7, -1, slot])
    key_cache, value_cache = storage[:, 2:7]
    query, key, value = torch.randn(TOKENS, 8, 16).split([4, 2, 2], 1)
    rope_and_write_kv(query, key, value, rope_of(16), key_cache, value_cache, slots)
    assert torch.equal(value_cache[1, 3], value[1]) and key_cache[1, 3].all()
    assert storage.count_nonzero() == 2 * 2 * 16
