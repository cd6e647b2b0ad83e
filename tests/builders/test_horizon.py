import pytest

from attn_backends import get
from builders import BatchBuffers, BatchError
from tests.factories import CPU, make_spec, make_tables

BACKENDS = ("torch_reference", "triton_paged", "triton_mla", "sparse_swa_mla")


def build(name, horizon):
    spec = make_spec(num_kv_heads=1, sliding_window=8)
    buffers = BatchBuffers(make_tables([30], max_seq_len=32), max_tokens=4)
    buffers.load([1], [5])
    builder = get(name).builder(spec, CPU, max_reqs=1, max_tokens=4, max_seq_len=32)
    return builder.build(buffers.view(0, num_reqs=1, num_tokens=1, max_query_len=1), horizon=horizon)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("horizon", [-1, 32])
def test_a_horizon_beyond_the_pages_is_refused_at_build(name, horizon):
    with pytest.raises(BatchError, match=rf"0 to 31, the tokens of the 8 pages .* got {horizon}; .* leave its pages"):
        build(name, horizon)


@pytest.mark.parametrize("horizon", [1.5, "2", True])
def test_a_horizon_that_is_no_int_is_refused(horizon):
    with pytest.raises(BatchError, match=f"horizons must be ints, got {horizon!r}"):
        build("torch_reference", horizon)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_longest_horizon_that_fits_the_pages_is_built(name):
    assert build(name, 31).num_reqs == 1
