"""The skinny_linear kernels compared with float64."""

import pytest
import torch

from attn_backends.kernels.linear.skinny_linear import MAX_ROWS, norm_linear
from attn_backends.kernels.linear.skinny_tiling import Tiling
from tests.attn_backends.kernels.linear.skinny_oracle import FORMS, NARROW, assert_within_budget, make_inputs

TILE = Tiling(block_n=4, block_k=16, num_warps=4)


CUTS = {
    "one row, by the table": (1, 21, 40, torch.float16, None),
    "the most rows, by the table": (MAX_ROWS, 21, 40, torch.float32, None),
    "whole tiles, by the table": (1, 16, 32, torch.float16, None),
    "whole tiles": (3, 16, 32, torch.float32, TILE),
    "partial tiles": (3, 18, 50, torch.float32, TILE),
    "less than a tile": (3, 1, 2, torch.float32, TILE),
    "sums of bfloat16": (4, 20, 50, torch.bfloat16, TILE),
}
CASES = [(form, False, name) for form in FORMS for name in CUTS]
CASES += [(form, True, name) for form in NARROW for name in CUTS if "tiles" in name]


@pytest.mark.parametrize(("form", "narrow", "cut"), CASES)
def test_every_skinny_form_is_right_in_every_tiling(form, narrow, cut):
    rows, n, k, dtype, tiling = CUTS[cut]
    inputs = make_inputs(form, rows, n, k, torch.bfloat16 if narrow else dtype)
    inputs = inputs.in_8_bits() if narrow else inputs
    assert_within_budget(inputs.launched(tiling) if tiling else inputs.call(), inputs)


@pytest.mark.parametrize(("form", "rows"), [("wide", 4), ("wide", 5), ("wide_norm", 11)])
def test_wide_linear_takes_more_rows_in_parts(form, rows):
    inputs = make_inputs(form, rows, 24, 50, torch.bfloat16)
    assert_within_budget(inputs.call(), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, MAX_ROWS])
def test_the_new_residual_is_x_plus_delta(rows, dtype):
    inputs = make_inputs("delta", rows, 40, 50, dtype)
    total = norm_linear(inputs.x, inputs.delta, inputs.norm, 1e-6, inputs.weight)[0]
    # The interpreter truncates fp32 to bf16 where the hardware rounds.
    tolerance = 2**-7 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(total, inputs.x + inputs.delta, rtol=tolerance, atol=0)


def test_float16_norm_overflow_is_within_budget():
    inputs = make_inputs("norm", 4, 20, 50, torch.float16)
    inputs.x *= 15000
    inputs.norm *= 8
    assert_within_budget(inputs.launched(TILE), inputs)


def test_zero_row_is_normed_to_zeros():
    inputs = make_inputs("gated", 3, 18, 50)
    inputs.x[1] = 0
    assert torch.equal(inputs.launched(TILE)[1], torch.zeros(18))
