"""The caches of KV groups, and the metadata built for ragged prompts."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from attn_backends import KVCache
from attn_backends.torch_reference import TorchReference
from spec_decode.paged.kv_groups import build_ragged, make_group
from spec_decode.testing.memory import read
from tests.factories import CPU, make_spec, make_tables


class SeenBuilder:
    def build(self, batch):
        return batch


def make_groups(count):
    """Groups whose metadata is the view that it would be built of."""
    return [
        SimpleNamespace(
            name=f"group {index}", caches={}, num_pages=100, make_builder=lambda tables, num_tokens: SeenBuilder()
        )
        for index in range(count)
    ]


def test_launch_is_sized_by_longest_ragged_prompt(monkeypatch):
    monkeypatch.setattr("spec_decode.paged.kv_groups.check_pools", lambda groups, tables: None)
    tables = make_tables([20, 9, 30], page_sizes=(4, 8), max_reqs=3, max_seq_len=32)

    batch, views = build_ragged(make_groups(2), tables, [5, 9, 1], [20, 9, 30])

    for view in views:
        assert (view.num_reqs, view.num_tokens, view.max_query_len, view.max_seq_len) == (3, 15, 9, 30)
        assert not view.uniform and view.host_query_lens == (5, 9, 1) and tuple(view.host_seq_lens) == (20, 9, 30)
    assert batch.positions[:15].tolist() == [*range(15, 20), *range(9), 29]


def test_prompts_of_one_length_are_uniform(monkeypatch):
    monkeypatch.setattr("spec_decode.paged.kv_groups.check_pools", lambda groups, tables: None)
    tables = make_tables([20, 9], page_sizes=(4,), max_reqs=2, max_seq_len=32)
    _, (view,) = build_ragged(make_groups(1), tables, [4, 4], [20, 9])
    assert view.uniform and view.max_query_len == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_caches_are_zeroed(dtype):
    class Used(TorchReference):
        def allocate_kv(self, spec, num_pages, device):
            last = torch.zeros(num_pages, 2, 4, 2, 16)
            last[-1, 1, -1, -1, -1] = torch.nan if dtype.is_floating_point else 1
            pages = last.to(dtype)
            return KVCache(pages[:, 0], pages[:, 1])

    group = make_group("full", Used(), make_spec(), [0, 1], num_pages=5, device=CPU)
    for cache in group.caches.values():
        assert all(part.view(torch.uint8).eq(0).all() for part in (cache.key, cache.value))


_ALLOCATE = """
from attn_backends import get
from spec_decode.paged.kv_groups import make_group
from spec_decode.testing.memory import read
from tests.factories import CPU, make_spec

for name in ("torch_reference", "triton_paged"):
    before = read(CPU).resident
    group = make_group("full", get(name), make_spec(head_dim=64), [0, 1], num_pages=50_000, device=CPU)
    print(read(CPU).resident - before, sum(2 * cache.key.nbytes for cache in group.caches.values()))
"""


@pytest.mark.skipif(read(CPU).resident is None, reason="needs a system that reports resident memory")
def test_unwritten_pages_take_no_cpu_memory():
    """In a process of its own: this one's allocator may reuse memory that other tests have written."""
    output = subprocess.run([sys.executable, "-c", _ALLOCATE], check=True, capture_output=True, text=True).stdout
    for line in output.splitlines():
        taken, size = map(int, line.split())
        assert size > 200 << 20 and taken < size // 20
    assert len(output.splitlines()) == 2
