"""The number of splits into which a builder has its kernel divide a request's tokens."""

from types import SimpleNamespace

import pytest
import torch

from builders import TritonPagedBuilder, flash_attn3, triton_paged
from builders.devices import Room
from builders.flash_attn3 import FlashAttn3Builder
from builders.kernels.kv_blocks import block_of
from tests.factories import CPU, make_spec


@pytest.fixture(autouse=True)
def sms_of_h200(monkeypatch):
    monkeypatch.setattr(flash_attn3, "num_sms", lambda device: 132)
    monkeypatch.setattr(triton_paged, "room_of", lambda device: Room(132, 227 * 1024))


def make_builder(builder, spec):
    return builder(spec, CPU, max_reqs=4096, max_tokens=8192, max_seq_len=16384)


@pytest.mark.parametrize(
    ("num_reqs", "kv_heads", "query_len", "max_seq_len", "splits"),
    [
        pytest.param(1, 2, 1, 1024, 32, id="half of the device would be idle: shorter splits"),
        pytest.param(1, 2, 4, 1024, 32, id="a short extend is no more than a tile"),
        pytest.param(1, 2, 8, 1024, 16, id="a longer one has rows enough for a split"),
        pytest.param(1, 8, 1, 1024, 16, id="nearly all of the device"),
        pytest.param(4, 8, 1, 1024, 8, id="two programs for each multiprocessor"),
        pytest.param(32, 8, 1, 1024, 1, id="no more programs than that"),
        pytest.param(1, 2, 1, 16384, 128, id="no more than 128"),
        pytest.param(256, 8, 1, 1024, 1, id="at least one"),
        pytest.param(1, 8, 8, 16384, 33, id="a verification"),
        pytest.param(8, 8, 8, 16384, 4, id="those of a few requests"),
        pytest.param(32, 8, 8, 1024, 1, id="those of many"),
        pytest.param(1, 8, 16, 16384, 33, id="a verification that fills a tile"),
        pytest.param(1, 8, 64, 16384, 8, id="the end of a prompt: several tiles"),
        pytest.param(1, 1, 64, 16384, 66, id="its tiles leave most of the device idle"),
        pytest.param(1, 8, 512, 16384, 1, id="part of a prompt, whose tiles fill the device"),
        pytest.param(1, 8, 8192, 16384, 1, id="a prompt"),
    ],
)
def test_paged_kernel_splits_fill_the_device(num_reqs, kv_heads, query_len, max_seq_len, splits):
    builder = make_builder(TritonPagedBuilder, make_spec(num_q_heads=4 * kv_heads, num_kv_heads=kv_heads, head_dim=128))
    tokens = num_reqs * query_len
    batch = SimpleNamespace(num_reqs=num_reqs, max_query_len=query_len, num_tokens=tokens, max_seq_len=max_seq_len)
    assert builder.splits(batch) == splits


@pytest.mark.parametrize(("head_dim", "splits"), [(128, 14), (256, 7)])
def test_little_shared_memory_holds_fewer_programs(head_dim, splits, monkeypatch):
    monkeypatch.setattr(triton_paged, "room_of", lambda device: Room(58, 99 * 1024, wgmma=False))
    spec = make_spec(num_q_heads=32, num_kv_heads=8, head_dim=head_dim, dtype=torch.bfloat16)
    builder = make_builder(TritonPagedBuilder, spec)
    assert builder.splits(SimpleNamespace(num_reqs=1, max_query_len=16, num_tokens=16, max_seq_len=16384)) == splits


@pytest.mark.parametrize(
    ("kib", "rows", "row_bytes", "tokens"),
    [
        pytest.param(227, 16, 512, 128, id="heads of 128 dims"),
        pytest.param(227, 32, 512, 128, id="a verification"),
        pytest.param(227, 64, 512, 64, id="two blocks"),
        pytest.param(227, 32, 256, 256, id="64 dims"),
        pytest.param(227, 32, 128, 256, id="fewer: scores take registers too"),
        pytest.param(227, 32, 1024, 64, id="256 dims"),
        pytest.param(227, 32, 768, 64, id="values of other dims"),
        pytest.param(163, 32, 512, 128, id="an A100"),
        pytest.param(99, 32, 512, 64, id="a card with little shared memory"),
        pytest.param(99, 32, 1024, 16, id="the same, heads of 256 dims"),
        pytest.param(99, 64, 1024, 32, id="room for one program"),
        pytest.param(99, 64, 4096, 16, id="no block below a matrix product's least"),
    ],
)
def test_two_blocks_fit_shared_memory(kib, rows, row_bytes, tokens):
    assert block_of(rows, row_bytes, 2, Room(132, kib * 1024, wgmma=kib == 227)).tokens == tokens


GROUPED = make_spec(num_q_heads=32, num_kv_heads=8, head_dim=128)
LATENT = make_spec(num_q_heads=128, num_kv_heads=1, head_dim=576, value_dim=512)


@pytest.mark.parametrize(
    ("spec", "num_reqs", "query_len", "splits"),
    [
        pytest.param(GROUPED, 1, 1, 32, id="a decode of one request"),
        pytest.param(GROUPED, 1, 5, 32, id="its verification"),
        pytest.param(GROUPED, 32, 16, 8, id="one tile of rows a request: as many as 64 MiB hold"),
        pytest.param(GROUPED, 3, 64, 21, id="several tiles that leave a quarter of the device idle"),
        pytest.param(GROUPED, 4, 64, 1, id="several that fill it"),
        pytest.param(GROUPED, 1, 8192, 1, id="a prompt"),
        pytest.param(GROUPED, 4096, 1, 1, id="at least one"),
        pytest.param(LATENT, 32, 1, 8, id="wide values take more memory"),
    ],
)
def test_flash_attn3_splits_follow_batch_shape(spec, num_reqs, query_len, splits):
    batch = SimpleNamespace(num_reqs=num_reqs, max_query_len=query_len, num_tokens=num_reqs * query_len)
    assert make_builder(FlashAttn3Builder, spec)._splits_of(batch) == splits
