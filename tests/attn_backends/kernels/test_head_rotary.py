"""Rotating queries forward and outputs back, compared with complex numbers in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from attn_backends.kernels.head_rotary import inverse_rotary, prepare_query
from builders import BatchError

CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5}}
SHAPES = [(3, 64, 512, 64), (2, 5, 576, 64), (3, 1, 64, 64), (2, 3, 80, 6), (1, 7, 2, 2)]
"""Tokens, heads, dims, rotary dims."""
POSITIONS = torch.tensor([3, 5])


def noise(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_table(rotary, positions=40):
    angles = torch.arange(positions)[:, None] * 0.7 ** torch.arange(rotary // 2)
    return torch.cat([angles.cos(), angles.sin()], 1)


def angles_of(positions, table):
    cos, sin = table[positions].double().chunk(2, 1)
    return torch.complex(cos, sin)[:, None]


def rotated(x, factors):
    """fp64 x [T, H, D] with its last pairs, as complex numbers, times factors [T, 1, pairs]."""
    start = x.shape[2] - 2 * factors.shape[2]
    pairs = torch.view_as_complex(x[..., start:].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([x[..., :start], torch.view_as_real(pairs * factors).flatten(-2)], -1)


def prepared(query, positions, table, eps):
    wide = query.double()
    return rotated(wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt(), angles_of(positions, table))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("tokens", "heads", "dim", "rotary"), SHAPES)
def test_query_normed_and_rotated_output_rotated_back(tokens, heads, dim, rotary, dtype):
    query, table, positions = noise(tokens, heads, dim, dtype=dtype) * 3, make_table(rotary), torch.arange(tokens) * 9
    before = query.clone()
    found = prepare_query(query, positions, table, eps=1e-6)
    assert found.dtype == dtype and found.is_contiguous() and torch.equal(query, before)
    torch.testing.assert_close(found.double(), prepared(query, positions, table, 1e-6), **CLOSE[dtype])
    expected = rotated(query.double(), angles_of(positions, table).conj())
    assert inverse_rotary(query, positions, table) is query
    torch.testing.assert_close(query.double(), expected, **CLOSE[dtype])


def test_eps_keeps_a_small_head_small():
    query, table = noise(2, 3, 64) * 1e-3, make_table(16)
    found = prepare_query(query, POSITIONS, table, eps=1e-2)
    torch.testing.assert_close(found.double(), prepared(query, POSITIONS, table, 1e-2), rtol=1e-5, atol=1e-7)
    assert found.abs().max() < 0.1


def test_strided_view_is_rotated_in_place():
    whole, table = noise(2, 5, 100), make_table(16)
    view, before = whole[:, 1:4, 20:84], whole.clone()
    assert torch.equal(
        prepare_query(view, POSITIONS, table, eps=1e-6), prepare_query(view.contiguous(), POSITIONS, table, eps=1e-6)
    )
    inverse_rotary(view, POSITIONS, table)
    changed = (whole != before).nonzero()
    assert changed[:, 1].unique().tolist() == [1, 2, 3] and changed[:, 2].unique().tolist() == list(range(68, 84))


def test_nan_head_leaves_other_heads_unchanged():
    query, table = noise(2, 3, 64), make_table(16)
    clean = prepare_query(query, POSITIONS, table, eps=1e-6)
    query[1, 1, 63] = math.nan
    found = prepare_query(query, POSITIONS, table, eps=1e-6)
    assert found[1, 1].isnan().any()
    found[1, 1] = clean[1, 1]
    assert torch.equal(found, clean)


@pytest.mark.outside_inference_mode
def test_rotary_gradients_match_formula_out_of_place():
    query, table = noise(2, 3, 8).requires_grad_(), make_table(4)
    before, wide = query.detach().clone(), query.detach().double().requires_grad_()
    weight = noise(2, 3, 8, seed=1)
    (prepare_query(query, POSITIONS, table, eps=1e-6) * weight).sum().backward()
    (prepared(wide, POSITIONS, table, 1e-6) * weight).sum().backward()
    torch.testing.assert_close(query.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)

    query.grad = None
    (inverse_rotary(query, POSITIONS, table) * weight).sum().backward()
    assert torch.equal(query.detach(), before)
    # The turn is orthogonal: its gradient is the forward turn of the weights.
    expected = rotated(weight.double(), angles_of(POSITIONS, table))
    torch.testing.assert_close(query.grad.double(), expected, rtol=1e-5, atol=1e-6)


GOOD = {"x": noise(2, 3, 64), "positions": torch.tensor([3, 5]), "table": make_table(16)}
REFUSED = {
    "too few positions": ({"positions": torch.tensor([3])}, r"positions must be torch.int64 \[2\]"),
    "positions of another dtype": ({"positions": torch.tensor([3, 5]).int()}, "positions must be torch.int64"),
    "positions apart": ({"positions": torch.tensor([3, 9, 5])[::2]}, "positions must be contiguous"),
    "a table of another dtype": ({"table": make_table(16).double()}, "table must be torch.float32"),
    "a table of more dims": ({"table": make_table(80)}, r"got \[40, 80\]"),
    "a table of an odd number of dims": ({"table": torch.zeros(40, 15)}, r"got \[40, 15\]"),
    "a strided table": ({"table": make_table(32)[:, ::2]}, "a rotary table must be contiguous"),
    "heads of an odd number of dims": ({"x": noise(2, 3, 65)}, "for rows of 65"),
    "a strided head dim": ({"x": noise(2, 64, 3).transpose(1, 2)}, "contiguous last dim"),
    "no head axis": ({"x": noise(2, 64)}, r"must be \[tokens, heads, dim\]"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_misread_rotary_tensors_raise_batch_error(change, message):
    args = {**GOOD, **change}
    before = args["x"].clone()
    with pytest.raises(BatchError, match=message):
        prepare_query(*args.values(), eps=1e-6)
    with pytest.raises(BatchError, match=message):
        inverse_rotary(*args.values())
    assert torch.equal(args["x"], before)
