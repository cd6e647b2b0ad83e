import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.drafter.kernels.block_inputs import block_inputs
from spec_decode.drafter.kernels.gather_block import gather_block
from spec_decode.sampling.kernels.sample_block import sample_block


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both_ways(op, *args):
    by_kernel = op(*args)
    with torch_implementations():
        return by_kernel, op(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("drafts", "width"), [(1, 5), (4, 96), (7, 1500)])
def test_block_inputs(drafts, width, dtype):
    accepted = torch.tensor([0, drafts, drafts // 2, -3, 99], dtype=torch.int32)
    tokens = torch.randint(0, 99, (5, 2 + drafts))[:, 1:]
    args = (tokens, random(5, 1 + drafts, width, dtype=dtype), torch.arange(5) + 200, accepted)
    by_kernel, by_torch = both_ways(block_inputs, *args, random(width, seed=1, dtype=dtype), 7, 2 * drafts)
    assert all(torch.equal(a, b) for a, b in zip(by_kernel, by_torch, strict=True))


def test_nothing_behind_a_rows_last_accepted_token_is_read():
    states = random(2, 4, 8)
    accepted = torch.tensor([1, 0], dtype=torch.int32)
    states[0, 2:], states[1, 1:] = torch.nan, torch.nan
    args = (torch.zeros(2, 4, dtype=torch.int64), states, torch.zeros(2, dtype=torch.int64), accepted)
    _, found = block_inputs(*args, torch.ones(8), 3, 6)
    assert found.isfinite().all()


@pytest.mark.parametrize(("columns", "width"), [(1, 5), (4, 96), (7, 1500)])
def test_gather_block(columns, width):
    accepted = torch.tensor([0, columns, 1, -9, 99], dtype=torch.int32)
    hidden = random(5 * 2 * columns, width + 3)[:, :width]
    args = (hidden, torch.randint(0, 999, (5 * 2 * columns,)), accepted, 2 * columns, columns)
    by_kernel, by_torch = both_ways(gather_block, *args)
    assert all(torch.equal(a, b) for a, b in zip(by_kernel, by_torch, strict=True))


def sampled(columns, vocab, *, confidence=0.0, token_map=None, dtype=torch.float32, nan=False):
    rows, generator = 4, torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(rows * columns, vocab, generator=generator).to(dtype)
    if nan:
        logits[1] = torch.nan
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 2**20, (rows * columns,), generator=generator)
    whole = vocab if token_map is None else int(token_map.max()) + 2
    tokens, cached = torch.full((rows + 1, columns), 7), torch.full((rows + 1, columns, whole), 7.0)
    sample_block(
        logits, torch.tensor([0.0, 0.7, 1.0, 0.0]), seeds, positions, torch.tensor([5, 5, 5, 0], dtype=torch.int32),
        tokens, cached, torch.tensor([9, 9, columns - 1, 9], dtype=torch.int32), torch.tensor([columns]).int(),
        torch.tensor([confidence]), token_map,
    )  # fmt: skip
    return tokens, cached


@pytest.mark.parametrize("options", [{}, {"confidence": 0.2}, {"dtype": torch.bfloat16}, {"nan": True}])
@pytest.mark.parametrize(("columns", "vocab"), [(1, 3), (4, 37), (7, 600), (15, 2100)])
def test_sample_block(columns, vocab, options):
    by_kernel = sampled(columns, vocab, **options)
    with torch_implementations():
        by_torch = sampled(columns, vocab, **options)
    assert torch.equal(by_kernel[1].nan_to_num(9), by_torch[1].nan_to_num(9))
    if "nan" not in options:
        assert by_kernel[0].tolist() == by_torch[0].tolist()
    assert by_kernel[0][:4].lt(vocab).all() and by_kernel[0][4].eq(7).all()


def test_sample_block_of_a_smaller_vocabulary():
    token_map = torch.randperm(90)[:37]
    by_kernel = sampled(4, 37, token_map=token_map)
    with torch_implementations():
        by_torch = sampled(4, 37, token_map=token_map)
    assert all(torch.equal(a, b) for a, b in zip(by_kernel, by_torch, strict=True))
