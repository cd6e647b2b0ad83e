from types import SimpleNamespace

import pytest

from builders import TritonPagedBuilder, paged
from tests.factories import CPU, make_spec


@pytest.fixture
def an_h200(monkeypatch):
    monkeypatch.setattr(paged, "num_sms", lambda device: 132)


@pytest.mark.parametrize(
    ("num_reqs", "kv_heads", "query_len", "max_seq_len", "splits"),
    [
        pytest.param(1, 2, 1, 1024, 32, id="half of the device would be idle: shorter splits"),
        pytest.param(1, 2, 4, 1024, 32, id="a short extend is no more than a tile"),
        pytest.param(1, 2, 8, 1024, 16, id="a longer one has rows enough for a split"),
        pytest.param(1, 8, 1, 1024, 16, id="nearly all of the device"),
        pytest.param(4, 8, 1, 1024, 16, id="a few programs for each multiprocessor"),
        pytest.param(32, 8, 1, 1024, 2, id="no more programs than that"),
        pytest.param(1, 2, 1, 16384, 64, id="no more than 64"),
        pytest.param(256, 8, 1, 1024, 1, id="at least one"),
    ],
)
@pytest.mark.usefixtures("an_h200")
def test_splits_fill_a_device(num_reqs, kv_heads, query_len, max_seq_len, splits):
    builder = TritonPagedBuilder(
        make_spec(num_q_heads=4 * kv_heads, num_kv_heads=kv_heads),
        CPU,
        max_reqs=256,
        max_tokens=2048,
        max_seq_len=16384,
    )
    batch = SimpleNamespace(num_reqs=num_reqs, max_query_len=query_len, max_seq_len=max_seq_len)
    assert builder.splits(batch) == splits
