import pytest
import torch

from attn_backends.kernels.write_kv import write_kv
from builders import BatchError
from tests.factories import indexes_fp8, make_cache, make_spec

SPEC = make_spec(value_dim=8)


def new(tokens, dtype=torch.float32):
    return torch.randn(tokens, 2, 16).to(dtype), torch.randn(tokens, 2, 8).to(dtype)


def written(key, value, cache, slots):
    """Keys and values as the op leaves them, and as storing token after token does."""
    expected = [part.clone() for part in cache]
    write_kv(key, value, *cache, torch.tensor(slots))
    for at, slot in enumerate(slots):
        if 0 <= slot < expected[0].shape[0] * 4:
            expected[0][slot // 4, slot % 4], expected[1][slot // 4, slot % 4] = key[at], value[at]
    return [*cache], expected


def random_cache():
    cache = make_cache(SPEC, 5)
    return cache.key, cache.value


PROJECTION = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))
STORED = {
    "tokens": (*new(3), random_cache()),
    "views of a projection": (PROJECTION[:, 4:6], PROJECTION[:, 6:, :8], random_cache()),
    "a cache of keys' and values' pages": (
        PROJECTION[:, 4:6],
        PROJECTION[:, 6:],
        torch.randn(5, 2, 4, 2, 16).unbind(1),
    ),
    "a cache of keys' and values' dims": (*new(3), torch.randn(5, 4, 2, 24).split([16, 8], -1)),
}


@pytest.mark.parametrize("slots", [[9, -1, 3], [-1, -1, -1], [20, 7, -2], [2**40, 7, -(2**40)]], ids=str)
@pytest.mark.parametrize(("key", "value", "cache"), STORED.values(), ids=STORED)
def test_write_kv_stores_at_slot_and_nowhere_else(key, value, cache, slots):
    found, expected = written(key, value, cache, slots)
    assert all(map(torch.equal, found, expected))


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
    "keys with dims apart": (lambda k, v: (k.repeat(1, 1, 2)[..., ::2], v), "the last dim of keys, values"),
    "values with dims apart": (lambda k, v: (k, v.repeat(1, 1, 2)[..., ::2]), "the last dim of keys, values"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_misread_write_kv_tensor_writes_nothing(change, message):
    cache, before = make_cache(SPEC, 5), make_cache(SPEC, 5)
    with pytest.raises(BatchError, match=message):
        write_kv(*change(*new(2)), cache.key, cache.value, torch.tensor([0, 1]))
    assert torch.equal(cache.key, before.key) and torch.equal(cache.value, before.value)


@pytest.mark.parametrize("part", ["key", "value"])
def test_cache_without_contiguous_dims_writes_nothing(part):
    parts = {"key": torch.zeros(5, 4, 2, 16), "value": torch.zeros(5, 4, 2, 8)}
    parts[part] = parts[part].mT.contiguous().mT
    with pytest.raises(BatchError, match="the last dim of keys, values and their caches must be contiguous"):
        write_kv(*new(1), *parts.values(), torch.tensor([1]))
    assert not any(part.any() for part in parts.values())


SLOTS_REFUSED = {
    "slots apart": (torch.tensor([0, 5, 1, 5])[::2], "slot_mapping must be contiguous, got stride 2"),
    "slots of 32 bits": (torch.tensor([0, 1], dtype=torch.int32), r"slot_mapping must be torch\.int64 \[2\]"),
}


@pytest.mark.parametrize(("slots", "message"), SLOTS_REFUSED.values(), ids=SLOTS_REFUSED)
def test_misread_slots_write_nothing(slots, message):
    cache, before = make_cache(SPEC, 5), make_cache(SPEC, 5)
    with pytest.raises(BatchError, match=message):
        write_kv(*new(2), cache.key, cache.value, slots)
    assert torch.equal(cache.key, before.key) and torch.equal(cache.value, before.value)


ONE = torch.ones(1)


def e4m3_caches(heads=1):
    return [torch.zeros(1, 2, heads, 4, dtype=torch.float8_e4m3fn) for _ in range(2)]


@indexes_fp8
def test_e4m3_cache_stores_nearest_number_in_range():
    new = torch.tensor([[[0.3, -1.06, 500.0, 448.0]]], dtype=torch.bfloat16)
    caches = e4m3_caches()

    write_kv(new, new * 2, *caches, torch.tensor([1]), (ONE, ONE))

    assert caches[0][0, 1, 0].float().tolist() == [0.3125, -1.0, 448.0, 448.0]
    assert caches[1][0, 1, 0].float().tolist() == [0.625, -2.0, 448.0, 448.0]


@indexes_fp8
def test_e4m3_cache_stores_numbers_over_the_scales_of_their_head():
    new, caches = torch.tensor([0.3, -1.06, 500.0, 448.0]).expand(1, 2, 4), e4m3_caches(2)

    write_kv(new, new, *caches, torch.tensor([1]), (torch.tensor([1.0, 2.0]), torch.tensor([0.5, 4.0])))

    assert caches[0][0, 1].float().tolist() == [[0.3125, -1.0, 448.0, 448.0], [0.15625, -0.5, 256.0, 224.0]]
    assert caches[1][0, 1].float().tolist() == [[0.625, -2.0, 448.0, 448.0], [0.078125, -0.25, 128.0, 112.0]]


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "got a cache of torch.float8_e4m3fn with none"),
        ((ONE, torch.ones(2)), r"the value scales must be torch.float32 .1."),
        ((ONE.double(), ONE), "the key scales must be torch.float32"),
    ],
)
def test_e4m3_cache_rejects_other_scales(scales, message):
    new, caches = torch.zeros(1, 1, 4), e4m3_caches()
    with pytest.raises(BatchError, match=message):
        write_kv(new, new, *caches, torch.tensor([1]), scales)


def test_a_wider_cache_rejects_scales():
    caches = torch.zeros(2, 1, 2, 1, 4)
    with pytest.raises(BatchError, match=r"a cache of torch\.float32 with some"):
        write_kv(*torch.zeros(2, 1, 1, 4), *caches, torch.tensor([1]), (ONE, ONE))


def test_e4m3_cache_rejects_unlike_dtypes():
    new = torch.zeros(1, 1, 4, dtype=torch.bfloat16)
    caches = e4m3_caches()

    with pytest.raises(BatchError, match=r"value must be torch\.bfloat16"):
        write_kv(new, new.half(), *caches, torch.tensor([1]), (ONE, ONE))


@indexes_fp8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_e4m3_cast_sees_only_clamped_numbers(monkeypatch, dtype):
    """The result of a cast beyond the range of e4m3 depends on the version of torch."""
    cast, seen = torch.Tensor.to, []

    def watched(tensor, wanted):
        seen.append(tensor.abs().nan_to_num(0).max().item())
        return cast(tensor, wanted)

    monkeypatch.setattr(torch.Tensor, "to", watched)
    new = cast(torch.tensor([[[470.0, -1e4, float("inf"), float("nan")]]]), dtype)
    caches = e4m3_caches()
    write_kv(new, -new, *caches, torch.tensor([1]), (ONE, ONE))
    assert seen == [448.0, 448.0] and caches[0][0, 1, 0].float().isnan().tolist() == [False, False, False, True]
