import pytest
import torch

from attn_backends.kernels.rope import Rope, apply_rope
from builders.kernels.triton_runtime import torch_implementations
from spec_decode.models.kernels.add_rms_norm import add_rms_norm
from spec_decode.models.kernels.embed_concat import embed_concat
from spec_decode.models.kernels.mla_query_key import mla_query_key
from spec_decode.models.kernels.swiglu import swiglu

DTYPES = [torch.float32, torch.float16]
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float16: {"rtol": 2e-3, "atol": 1e-3}}


def noise(*shape, dtype=torch.float32):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)


def assert_both_ways_agree(call, dtype):
    by_kernel = call()
    with torch_implementations():
        torch.testing.assert_close(by_kernel, call(), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (1, 2), (6, 80)])
def test_rotate(heads, dim, dtype):
    rope = Rope(torch.tensor([0, 31, 7]), noise(32, dim).cos())
    assert_both_ways_agree(lambda: apply_rope(noise(3, heads, dim, dtype=dtype), rope), dtype)


def test_rotate_of_some_heads_of_a_projection_leaves_the_others_alone():
    rope, packed = Rope(torch.tensor([0, 31, 7]), noise(32, 16).cos()), noise(3, 9, 16)

    def rotate_some():
        whole = packed.clone()
        apply_rope(whole[:, 2:6], rope)
        return whole

    assert_both_ways_agree(rotate_some, torch.float32)
    assert torch.equal(rotate_some()[:, [0, 1, 6, 7, 8]], packed[:, [0, 1, 6, 7, 8]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 20, 64, 300])
def test_add_rms_norm(width, dtype):
    x, weight = noise(4, width, dtype=dtype), noise(width, dtype=dtype)
    assert_both_ways_agree(lambda: add_rms_norm(x, x.flip(0), weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shares", [1, 3])
def test_add_rms_norm_of_a_delta_in_shares(shares, dtype):
    x, weight = noise(4, 48, dtype=dtype), noise(48, dtype=dtype)
    assert_both_ways_agree(lambda: add_rms_norm(x, noise(shares, 4, 48), weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 20, 300])
def test_a_norm_without_an_addition(width, dtype):
    weight = noise(width, dtype=dtype)
    assert_both_ways_agree(lambda: add_rms_norm(noise(4, width, dtype=dtype), None, weight, 1e-6)[1], dtype)


@pytest.mark.parametrize("view", [lambda x: x[:, 1], lambda x: x[:, 1:3], lambda x: x[:, :, ::2], lambda x: x.mT])
def test_a_norm_of_a_view(view):
    x = view(noise(5, 4, 6))
    assert_both_ways_agree(lambda: add_rms_norm(x, None, noise(x.shape[-1]), 1e-6)[1], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 40, 3000])
def test_swiglu(width, dtype):
    assert_both_ways_agree(lambda: swiglu(noise(3, width, dtype=dtype)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_with_a_limit(dtype):
    assert_both_ways_agree(lambda: swiglu(noise(3, 300, dtype=dtype), 0.7), dtype)


def test_a_limit_makes_no_number_of_nan():
    gate_up = noise(1, 8)
    gate_up[0, [1, 6]] = torch.nan
    assert swiglu(gate_up, 0.7).isnan().tolist() == [[False, True, True, False]]


def test_swiglu_of_a_strided_projection():
    assert_both_ways_agree(lambda: swiglu(noise(3, 90)[:, 5:45]), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 20, 64, 1500])
def test_embed_concat(width, dtype):
    ids, table, hidden = torch.tensor([3, 0, 3]), noise(5, width, dtype=dtype), noise(3, width, dtype=dtype)
    assert_both_ways_agree(lambda: embed_concat(ids, table, hidden), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 20, 64, 1500])
def test_embed_concat_of_both_normed(width, dtype):
    ids, table, hidden = torch.tensor([3, 0, 3]), noise(5, width, dtype=dtype), noise(3, width, dtype=dtype)
    norms = [noise(width, dtype=dtype), noise(2 * width, dtype=dtype)[width:]]
    assert_both_ways_agree(lambda: embed_concat(ids, table, hidden, norms, 1e-6), dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("token", [-1, -(2**40), 5, 2**40])
def test_a_token_outside_the_vocabulary_embeds_as_zeros(token, normed):
    table, hidden = noise(9, 16)[2:7], noise(2, 16)
    norms = [noise(16)] * 2 if normed else []
    both = embed_concat(torch.tensor([1, token]), table, hidden, norms, 1e-6)
    assert both[1, :16].tolist() == [0] * 16 and both[0, :16].abs().min() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dims", "rotary"), [(1, 2, 2), (5, 24, 8), (3, 20, 6)])
def test_mla_query_key(heads, dims, rotary, dtype):
    absorbed = noise(heads, 3, dims, dtype=dtype).transpose(0, 1)
    rotated = noise(3, heads, 4 + rotary, dtype=dtype)[..., 4:]
    latent = noise(3, 9 + dims + rotary, dtype=dtype)[:, 9:]
    rope = Rope(torch.tensor([0, 31, 7]), noise(32, rotary).cos())
    assert_both_ways_agree(lambda: mla_query_key(absorbed, rotated, latent, noise(dims), 1e-6, rope), dtype)


def test_embed_concat_of_strided_hidden_states():
    ids, table, hidden = torch.tensor([3, 0, 3]), noise(5, 16), noise(3, 40)[:, 8:24]
    assert_both_ways_agree(lambda: embed_concat(ids, table, hidden), torch.float32)
