"""How paged attention rotates queries and keys on their way into the cache."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from attn_backends import FusedWrite
from attn_backends.kernels.rope import Rope, rope_formula
from attn_backends.kernels.rope_and_write_kv import rope_and_write_kv
from attn_backends.kernels.write_latent import KvANormRope
from attn_backends.torch_reference import TorchReference
from builders import BatchError
from spec_decode.model_api import AttentionInputs
from spec_decode.paged.attention import PagedAttention, SplitAttention
from spec_decode.paged.kv_groups import KVGroup
from tests.factories import make_cache, make_spec

SPEC = make_spec()
SLOTS = torch.tensor([3, -1, 9])
ROPE = Rope(torch.tensor([2, 5, 0]), torch.randn(8, 16))
METADATA = [SimpleNamespace(slot_mapping=SLOTS)]


class Storing(TorchReference):
    """Attends to nothing: the output is the query. Counts its fused writes."""

    fused = 0

    def forward(self, query, cache, metadata, *, spec, sinks=None):
        return query

    def rope_and_write_kv(self, *args):
        self.fused += 1
        super().rope_and_write_kv(*args)


class Overriding(Storing):
    """States no capabilities of its own, and keeps the keys that it was given."""

    def write_kv(self, key, value, cache, metadata):
        self.given = key.clone()
        super().write_kv(key, value, cache, metadata)


class Unfused(Overriding):
    capabilities = replace(TorchReference.capabilities, fused_writes=frozenset())


def attended(backend, dtype=torch.float32, attention=PagedAttention):
    """(rotated query, cache, query and key as projected) of one call."""
    cache = make_cache(SPEC, 5)
    group = KVGroup(name="layers", backend=backend, spec=SPEC, caches={0: cache})
    query, key, value = torch.randn(3, 8, 16, dtype=dtype).split([4, 2, 2], 1)
    as_projected = query.clone(), key.clone()
    out = attention([group], METADATA)(AttentionInputs(0, query, key, value, rope=ROPE))
    return out, cache, *as_projected


def split_attention(uncaptured, rebuilt):
    """Attention between the pieces of a graph."""
    return partial(SplitAttention, uncaptured=uncaptured, built=rebuilt, split_op=lambda fn, *inputs: fn(*inputs))


def assert_rotated(out, cache, query, key):
    torch.testing.assert_close(out, rope_formula(query, ROPE))
    keys = rope_formula(key, ROPE).to(SPEC.dtype)
    assert torch.equal(cache.key[0, 3], keys[0]) and torch.equal(cache.key[2, 1], keys[2])


@pytest.mark.parametrize("name", ["rope", "kv_a_norm_rope"])
def test_head_has_the_first_tokens(name):
    norm = KvANormRope(weight=torch.rand(16), eps=1e-6, positions=ROPE.positions, table=ROPE.table)
    key = torch.randn(3, 2, 16)
    inputs = AttentionInputs(0, torch.randn(3, 4, 16), key, key[..., :8])
    inputs = inputs._replace(**{name: ROPE if name == "rope" else norm})
    first = inputs._replace(query=inputs.query.clone(), key=key.clone()).head(2).normed_and_rotated()
    for part, whole in zip(first, inputs.normed_and_rotated(), strict=True):
        torch.testing.assert_close(part, whole[:2])


def test_backend_with_fused_write_uses_one_kernel():
    backend = Storing()
    assert_rotated(*attended(backend))
    assert backend.fused == 1


@pytest.mark.parametrize("make", [Unfused, Overriding], ids=["that declares none", "that overrides the write"])
def test_backend_without_fused_write_gets_rotated_keys(make):
    backend = make()
    out, cache, query, key = attended(backend)
    assert_rotated(out, cache, query, key)
    torch.testing.assert_close(backend.given, rope_formula(key, ROPE))
    assert TorchReference.capabilities.fused_writes == frozenset(FusedWrite)
    assert backend.fused == 0 and backend.capabilities.fused_writes == frozenset()


def test_keys_unlike_cache_rotate_in_their_dtype():
    backend = Storing()
    assert_rotated(*attended(backend, torch.float64))
    assert backend.fused == 0


GOOD = {
    "query": torch.zeros(3, 4, 16),
    "key": torch.zeros(3, 2, 16),
    "value": torch.zeros(3, 2, 16),
    "rope": ROPE,
    "slot_mapping": SLOTS,
}
REFUSED = {
    "another dtype": ({"query": torch.zeros(3, 4, 16).half()}, "query must be torch.float32"),
    "no multiple": ({"query": torch.zeros(3, 3, 16)}, "multiple of 2.*got 3"),
    "strided dims": ({"query": torch.zeros(3, 16, 4).mT}, "even number of contiguous dims"),
    "fewer keys": ({"key": torch.zeros(2, 2, 16)}, "key must be"),
    "positions of another dtype": (
        {"rope": Rope(ROPE.positions.int(), ROPE.table)},
        "positions must be torch.int64",
    ),
    "positions apart": (
        {"rope": Rope(ROPE.positions.repeat_interleave(2)[::2], ROPE.table)},
        "positions must be contiguous",
    ),
    "keys of strided dims": ({"key": torch.zeros(3, 16, 2).mT}, "the last dim of keys"),
    "fewer positions": ({"rope": Rope(ROPE.positions[:2], ROPE.table)}, "positions must be"),
    "a narrower table": ({"rope": Rope(ROPE.positions, torch.zeros(8, 8))}, "the rotary table must be"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_misread_tensors_write_nothing(change, message):
    cache, before = make_cache(SPEC, 5), make_cache(SPEC, 5)
    with pytest.raises(BatchError, match=message):
        rope_and_write_kv(**{**GOOD, **change}, key_cache=cache.key, value_cache=cache.value)
    assert torch.equal(cache.key, before.key) and torch.equal(cache.value, before.value)


def test_split_attention_rotates_and_writes_alike():
    backend = Storing()
    assert_rotated(*attended(backend, attention=split_attention([0], [])))
    assert backend.fused == 1


def test_split_attention_refreshes_only_rebuilt_group():
    """Between pieces its metadata is read anew; the other group's stays as captured."""
    caches = [make_cache(SPEC, 5), make_cache(SPEC, 5)]
    groups = [KVGroup(name=f"{i}", backend=Storing(), spec=SPEC, caches={i: cache}) for i, cache in enumerate(caches)]
    metadata = [SimpleNamespace(slot_mapping=SLOTS), SimpleNamespace(slot_mapping=SLOTS)]
    attention = split_attention([0, 1], [1])(groups, metadata)
    before = [cache.key.clone() for cache in caches]
    metadata[:] = [SimpleNamespace(slot_mapping=torch.tensor([-1, -1, -1]))] * 2
    for layer in (0, 1):
        attention(AttentionInputs(layer, *torch.randn(3, 8, 16).split([4, 2, 2], 1)))
    changed = [not torch.equal(cache.key, was) for cache, was in zip(caches, before, strict=True)]
    assert changed == [True, False]
