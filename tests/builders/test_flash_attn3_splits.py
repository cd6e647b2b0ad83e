from types import SimpleNamespace

import pytest

from builders import FlashAttn3Builder, flash_attn3
from tests.factories import CPU, make_spec

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
def test_splits_follow_from_the_shape_of_the_batch(monkeypatch, spec, num_reqs, query_len, splits):
    monkeypatch.setattr(flash_attn3, "num_sms", lambda device: 132)
    builder = FlashAttn3Builder(spec, CPU, max_reqs=4096, max_tokens=8192, max_seq_len=16384)
    batch = SimpleNamespace(num_reqs=num_reqs, max_query_len=query_len, num_tokens=num_reqs * query_len)
    assert builder._splits_of(batch) == splits
