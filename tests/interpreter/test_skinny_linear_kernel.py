"""The kernels of skinny_linear against float64."""

import pytest
import torch

from spec_decode.models.kernels.skinny_linear import MAX_ROWS, norm_linear
from spec_decode.models.kernels.skinny_tiling import Tiling
from tests.spec_decode.models.kernels.skinny_oracle import FORMS, NARROW, assert_within_budget, make_inputs

TILE = Tiling(block_n=4, block_k=16, num_warps=4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float16), (MAX_ROWS, torch.float32)])
@torch.no_grad()
def test_every_form_cut_by_the_table(form, rows, dtype):
    inputs = make_inputs(form, rows, 21, 40, dtype)
    assert_within_budget(inputs.call(), inputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [(16, 32), (18, 50), (1, 2)])
def test_every_form_in_whole_and_partial_tiles_of_both_axes(form, n, k):
    inputs = make_inputs(form, 3, n, k)
    assert_within_budget(inputs.launched(TILE), inputs)


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 16, 32), (3, 18, 50)])
@torch.no_grad()
def test_every_form_in_8_bits(form, rows, n, k):
    inputs = make_inputs(form, rows, n, k, torch.bfloat16).in_8_bits()
    assert_within_budget(inputs.launched(TILE), inputs)
    if rows <= MAX_ROWS:
        assert_within_budget(inputs.call(), inputs)


@pytest.mark.parametrize("form", ["wide", "wide_norm"])
@pytest.mark.parametrize("rows", [4, 5, 11])
@torch.no_grad()
def test_a_wide_linear_takes_more_rows_a_few_at_a_time(rows, form):
    inputs = make_inputs(form, rows, 24, 50, torch.bfloat16)
    assert_within_budget(inputs.call(), inputs)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_keeps_its_sums_in_float32(form):
    inputs = make_inputs(form, 4, 20, 50, torch.bfloat16)
    assert_within_budget(inputs.launched(TILE), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, MAX_ROWS])
def test_the_new_residual_is_x_plus_delta(rows, dtype):
    inputs = make_inputs("delta", rows, 40, 50, dtype)
    total = norm_linear(inputs.x, inputs.delta, inputs.norm, 1e-6, inputs.weight)[0]
    # The interpreter truncates fp32 to bf16 where the hardware rounds.
    tolerance = 2**-7 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(total, inputs.x + inputs.delta, rtol=tolerance, atol=0)


def test_float16_whose_product_with_the_norms_weight_overflows():
    inputs = make_inputs("norm", 4, 20, 50, torch.float16)
    inputs.x *= 15000
    inputs.norm *= 8
    assert_within_budget(inputs.launched(TILE), inputs)


def test_a_row_of_zeros_is_normed_to_zeros():
    inputs = make_inputs("gated", 3, 18, 50)
    inputs.x[1] = 0
    assert torch.equal(inputs.launched(TILE)[1], torch.zeros(18))
