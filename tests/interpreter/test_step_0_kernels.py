import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.drafter.kernels.gather_last_hidden import gather_last_hidden
from spec_decode.drafter.kernels.shift_tokens import shift_tokens

WILD = torch.tensor([2, 0, -(2**31), 2**31 - 1, 1, -1], dtype=torch.int32)
NAN = float("nan")


@pytest.mark.parametrize("query_len", [1, 2, 5, 8])
@pytest.mark.parametrize("rows", [1, 6])
def test_shift_tokens(rows, query_len):
    ids, following = torch.arange(rows * query_len).view(rows, -1) + 10, torch.arange(rows) + 900
    by_kernel = shift_tokens(ids, following, WILD)
    with torch_implementations():
        assert by_kernel.tolist() == shift_tokens(ids, following, WILD).tolist()


def test_shift_tokens_of_a_strided_view():
    ids, following = torch.arange(60).view(6, 10)[:, 3:7], torch.arange(6) + 900
    by_kernel = shift_tokens(ids, following, WILD)
    with torch_implementations():
        assert by_kernel.tolist() == shift_tokens(ids, following, WILD).tolist()


@pytest.mark.parametrize("count", [-(2**31), 2**31 - 1])
def test_a_wild_count_shows_nothing_of_other_rows_tokens(count):
    ids = torch.tensor([[-7, -7, -7], [0, 1, 2], [-7, -7, -7]])
    accepted = torch.tensor([0, count, 0], dtype=torch.int32)
    row = shift_tokens(ids, torch.tensor([3, 4, 5]), accepted)[3:6].tolist()
    assert row == ([4, 4, 4] if count < 0 else [1, 2, 4])


def gathered(hidden, accepted, query_len, dtype):
    """What is gathered, with a row of NaN after it that nothing may write to."""
    rows = hidden.shape[0] // query_len
    buffer = torch.full((rows + 1, hidden.shape[1]), NAN, dtype=dtype)
    gather_last_hidden(hidden, accepted, buffer[:rows], query_len)
    assert buffer[rows].isnan().all()
    return buffer[:rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 20, 256, 1500])
def test_gather_last_hidden(width, dtype):
    hidden = torch.randn(24, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    by_kernel = gathered(hidden, WILD, 4, dtype)
    with torch_implementations():
        assert torch.equal(by_kernel, gathered(hidden, WILD, 4, dtype))


@pytest.mark.parametrize("view", [lambda x: x[:, 3:8], lambda x: x[:, ::2], lambda x: x[:10].mT])
def test_gather_last_hidden_of_a_view(view):
    hidden = view(torch.randn(12, 12, generator=torch.Generator().manual_seed(0)))
    by_kernel = gathered(hidden, WILD, 2, torch.float32)
    with torch_implementations():
        assert torch.equal(by_kernel, gathered(hidden, WILD, 2, torch.float32))


def test_only_the_state_gathered_is_read():
    hidden = torch.full((6, 8), NAN)
    hidden[[2, 3]] = torch.arange(16).view(2, 8).float()
    accepted = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
    assert gathered(hidden, accepted, 3, torch.float32).tolist() == hidden[[2, 3]].tolist()
