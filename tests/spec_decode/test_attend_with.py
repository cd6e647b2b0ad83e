"""How `attend_with` turns queries and keys on their way into the cache."""

from types import SimpleNamespace

import pytest
import torch

from attn_backends.kernels.rope import Rotation, rotated
from attn_backends.kernels.rope_and_write_kv import rotate_and_write_kv
from attn_backends.torch_reference import TorchReference
from builders import BatchError
from spec_decode.drafter import kv_groups
from spec_decode.drafter.kv_groups import KVGroup, attend_with
from spec_decode.drafter.step_buffers import attend_in_pieces
from tests.factories import make_cache, make_spec

SPEC = make_spec()
SLOTS = torch.tensor([3, -1, 9])
ROTATION = Rotation(torch.tensor([2, 5, 0]), torch.randn(8, 16))


class Storing(TorchReference):
    """Keeps the keys that it is given to store, and attends to nothing: the output is the query."""

    def forward(self, query, cache, metadata, *, spec, sinks=None):
        return query


class Overriding(Storing):
    def write_kv(self, key, value, cache, metadata):
        self.given = key.clone()
        super().write_kv(key, value, cache, metadata)


def attended(backend, dtype=torch.float32, *, gradient=False):
    """(turned query, cache, query and key as projected) of one call."""
    cache = make_cache(SPEC, 5)
    group = KVGroup(name="layers", backend=backend, spec=SPEC, caches={0: cache})
    packed = torch.randn(3, 8, 16, dtype=dtype, requires_grad=gradient)
    query, key, value = packed.split([4, 2, 2], 1)
    as_projected = query.detach().clone(), key.detach().clone()
    attend = attend_with([group], [SimpleNamespace(slot_mapping=SLOTS)])
    out = attend(0, query, key, value, rotation=ROTATION)
    return out, cache, *as_projected


def assert_turned(out, cache, query, key):
    torch.testing.assert_close(out, rotated(query, ROTATION.positions, ROTATION.table))
    keys = rotated(key, ROTATION.positions, ROTATION.table).to(SPEC.dtype)
    assert torch.equal(cache.key[0, 3], keys[0]) and torch.equal(cache.key[2, 1], keys[2])


@pytest.fixture
def fused(monkeypatch):
    calls = []

    def counted(*args):
        calls.append(args)
        rotate_and_write_kv(*args)

    monkeypatch.setattr(kv_groups, "rotate_and_write_kv", counted)
    return calls


def test_a_backend_that_stores_as_the_base_class_does_takes_the_one_kernel(fused):
    assert_turned(*attended(Storing()))
    assert len(fused) == 1


def test_a_backend_that_stores_in_its_own_way_gets_turned_keys(fused):
    backend = Overriding()
    out, cache, query, key = attended(backend)
    assert_turned(out, cache, query, key)
    torch.testing.assert_close(backend.given, rotated(key, ROTATION.positions, ROTATION.table))
    assert not fused


def test_a_write_replaced_on_the_backend_itself_is_called(fused):
    backend, given = Storing(), []
    backend.write_kv = lambda key, value, cache, metadata: given.append(key.clone())
    out, _, query, key = attended(backend)
    torch.testing.assert_close(out, rotated(query, ROTATION.positions, ROTATION.table))
    torch.testing.assert_close(given[0], rotated(key, ROTATION.positions, ROTATION.table))


def test_keys_of_another_dtype_than_the_cache_are_turned_in_their_own(fused):
    assert_turned(*attended(Storing(), torch.float64))
    assert not fused


def test_a_query_that_needs_a_gradient_keeps_it(fused):
    out = attended(Storing(), gradient=True)[0]
    assert out.requires_grad and not fused


GOOD = {
    "query": torch.zeros(3, 4, 16),
    "key": torch.zeros(3, 2, 16),
    "value": torch.zeros(3, 2, 16),
    "rotation": ROTATION,
    "slot_mapping": SLOTS,
}
REFUSED = {
    "another dtype": ({"query": torch.zeros(3, 4, 16).half()}, "query must be torch.float32"),
    "no multiple": ({"query": torch.zeros(3, 3, 16)}, "multiple of 2.*got 3"),
    "strided dims": ({"query": torch.zeros(3, 16, 4).mT}, "every head's dims adjacent"),
    "fewer keys": ({"key": torch.zeros(2, 2, 16)}, "key must be"),
    "positions of another dtype": (
        {"rotation": Rotation(ROTATION.positions.int(), ROTATION.table)},
        "positions must be torch.int64",
    ),
    "fewer positions": ({"rotation": Rotation(ROTATION.positions[:2], ROTATION.table)}, "positions must be"),
    "a narrower table": ({"rotation": Rotation(ROTATION.positions, torch.zeros(8, 8))}, "the rotary table must be"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_tensors_that_a_kernel_would_misread_are_refused_with_nothing_written(change, message):
    cache, before = make_cache(SPEC, 5), make_cache(SPEC, 5)
    with pytest.raises(BatchError, match=message):
        rotate_and_write_kv(**{**GOOD, **change}, key_cache=cache.key, value_cache=cache.value)
    assert torch.equal(cache.key, before.key) and torch.equal(cache.value, before.value)


def test_a_call_between_pieces_of_a_graph_turns_and_stores_as_every_other_does(fused):
    cache = make_cache(SPEC, 5)
    group = KVGroup(name="layers", backend=Storing(), spec=SPEC, caches={0: cache})
    query, key, value = torch.randn(3, 8, 16).split([4, 2, 2], 1)
    projected = (query.clone(), key.clone())
    phase = SimpleNamespace(metadata=[SimpleNamespace(slot_mapping=SLOTS)])
    attend = attend_in_pieces([group], phase, [0], [], lambda fn, *inputs: fn(*inputs))
    assert_turned(attend(0, query, key, value, rotation=ROTATION), cache, *projected)
    assert fused
