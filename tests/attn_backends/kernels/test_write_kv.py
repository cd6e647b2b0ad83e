import pytest
import torch

from attn_backends.kernels.write_kv import write_kv
from builders import BatchError
from tests.factories import indexes_fp8, make_cache, make_spec

SPEC = make_spec(value_dim=8)


def new(tokens, dtype=torch.float32):
    return torch.randn(tokens, 2, 16).to(dtype), torch.randn(tokens, 2, 8).to(dtype)


def test_a_token_is_stored_at_its_page_and_offset():
    cache, (key, value) = make_cache(SPEC, 5), new(2)
    write_kv(key, value, cache.key, cache.value, torch.tensor([9, 3]))
    assert torch.equal(cache.key[2, 1], key[0]) and torch.equal(cache.value[2, 1], value[0])
    assert torch.equal(cache.key[0, 3], key[1]) and torch.equal(cache.value[0, 3], value[1])


def test_no_other_slot_is_touched():
    cache, before = make_cache(SPEC, 5), make_cache(SPEC, 5)
    write_kv(*new(2), cache.key, cache.value, torch.tensor([9, 3]))
    others = [slot for slot in range(20) if slot not in (3, 9)]
    for found, was in ((cache.key, before.key), (cache.value, before.value)):
        assert torch.equal(found.flatten(0, 1)[others], was.flatten(0, 1)[others])


def test_slot_minus_one_writes_nothing():
    cache, before = make_cache(SPEC, 5), make_cache(SPEC, 5)
    write_kv(*new(3), cache.key, cache.value, torch.tensor([-1, -1, -1]))
    assert torch.equal(cache.key, before.key) and torch.equal(cache.value, before.value)


def test_keys_and_values_may_be_strided_apart():
    packed = torch.zeros(5, 2, 4, 2, 16)
    key, value = torch.randn(1, 2, 16), torch.randn(1, 2, 16)
    write_kv(key, value, packed[:, 0], packed[:, 1], torch.tensor([6]))
    assert torch.equal(packed[1, 0, 2], key[0]) and torch.equal(packed[1, 1, 2], value[0])
    assert packed.count_nonzero() == key.numel() + value.numel()


def test_keys_and_values_may_share_the_last_dim():
    packed = torch.zeros(5, 4, 2, 24)
    key, value = new(1)
    write_kv(key, value, packed[..., :16], packed[..., 16:], torch.tensor([6]))
    assert torch.equal(packed[1, 2], torch.cat([key[0], value[0]], -1))


def test_new_tokens_may_be_views_of_a_packed_projection():
    cache = make_cache(make_spec(), 5)
    packed = torch.randn(2, 8, 16)
    key, value = packed[:, 4:6], packed[:, 6:]
    write_kv(key, value, cache.key, cache.value, torch.tensor([0, 19]))
    assert torch.equal(cache.key[4, 3], key[1]) and torch.equal(cache.value[4, 3], value[1])


REFUSED = {
    "a key of another dtype": (lambda k, v: (k.bfloat16(), v), r"key must be torch\.float32.*got torch\.bfloat16"),
    "a value of another dtype": (lambda k, v: (k, v.bfloat16()), r"value must be torch\.float32"),
    "too few keys": (
        lambda k, v: (k[:1], v),
        r"key must be torch\.float32 \[2, 2, 16\].*got torch\.float32 \[1, 2, 16\]",
    ),
    "too few values": (lambda k, v: (k, v[:1]), r"value must be .*\[2, 2, 8\]"),
    "too few heads": (lambda k, v: (k[:, :1], v), "key must be"),
    "a value of the key's dim": (lambda k, v: (k, k), r"value must be .*got torch\.float32 \[2, 2, 16\]"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_tensor_that_a_kernel_would_misread_is_refused_with_nothing_written(change, message):
    cache, before = make_cache(SPEC, 5), make_cache(SPEC, 5)
    with pytest.raises(BatchError, match=message):
        write_kv(*change(*new(2)), cache.key, cache.value, torch.tensor([0, 1]))
    assert torch.equal(cache.key, before.key) and torch.equal(cache.value, before.value)


def e4m3_caches():
    return [torch.zeros(1, 2, 1, 4, dtype=torch.float8_e4m3fn) for _ in range(2)]


@indexes_fp8
def test_a_cache_of_e4m3_gets_the_nearest_number_in_its_range():
    new = torch.tensor([[[0.3, -1.06, 500.0, 448.0]]], dtype=torch.bfloat16)
    caches = e4m3_caches()

    write_kv(new, new * 2, *caches, torch.tensor([1]))

    assert caches[0][0, 1, 0].float().tolist() == [0.3125, -1.0, 448.0, 448.0]
    assert caches[1][0, 1, 0].float().tolist() == [0.625, -2.0, 448.0, 448.0]


def test_a_cache_of_e4m3_refuses_keys_and_values_of_unlike_dtypes():
    new = torch.zeros(1, 1, 4, dtype=torch.bfloat16)
    caches = e4m3_caches()

    with pytest.raises(BatchError, match=r"value must be torch\.bfloat16"):
        write_kv(new, new.half(), *caches, torch.tensor([1]))


@indexes_fp8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_number_beyond_the_range_of_e4m3_reaches_a_cast_whose_result_depends_on_the_torch(monkeypatch, dtype):
    cast, seen = torch.Tensor.to, []

    def watched(tensor, wanted):
        seen.append(tensor.abs().nan_to_num(0).max().item())
        return cast(tensor, wanted)

    monkeypatch.setattr(torch.Tensor, "to", watched)
    new = cast(torch.tensor([[[470.0, -1e4, float("inf"), float("nan")]]]), dtype)
    caches = e4m3_caches()
    write_kv(new, -new, *caches, torch.tensor([1]))
    assert seen == [448.0, 448.0] and caches[0][0, 1, 0].float().isnan().tolist() == [False, False, False, True]


@pytest.mark.parametrize("slot", [8, 2**40, -2, -(2**40)])
def test_a_slot_outside_of_the_cache_writes_nothing(slot):
    caches = [torch.zeros(2, 4, 2, 16), torch.zeros(2, 4, 2, 8)]
    key, value = new(2)
    write_kv(key, value, *caches, torch.tensor([slot, 7]))
    assert torch.equal(caches[0][1, 3], key[1]) and torch.equal(caches[1][1, 3], value[1])
    assert caches[0].count_nonzero() == key[1].numel() and caches[1].count_nonzero() == value[1].numel()
