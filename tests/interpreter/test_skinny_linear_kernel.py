"""The kernels of skinny_linear against float64."""

import pytest
import torch

from spec_decode.ops.skinny_linear import MAX_ROWS, norm_linear
from spec_decode.ops.skinny_tiling import Tiling
from tests.spec_decode.skinny_oracle import FORMS, assert_within_budget, make_inputs

MATVEC = Tiling(dot=False, block_n=4, block_k=16, num_warps=4, stages=1)
DOT = Tiling(dot=True, block_n=16, block_k=16, num_warps=4, stages=2)
CUTS = pytest.mark.parametrize("tile", [MATVEC, DOT], ids=["matvec", "dot"])
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 5, MAX_ROWS])
def test_every_form_cut_by_the_table(form, rows, dtype):
    inputs = make_inputs(form, rows, 21, 40, dtype)
    assert_within_budget(inputs.call(), inputs)


@CUTS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [(16, 32), (18, 50), (1, 2)])
def test_every_form_in_whole_and_partial_tiles_of_both_axes(tile, form, n, k):
    inputs = make_inputs(form, 3, n, k)
    assert_within_budget(inputs.launched(tile), inputs)


@CUTS
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_keeps_its_sums_in_float32(tile, form):
    inputs = make_inputs(form, 4, 20, 50, torch.bfloat16)
    assert_within_budget(inputs.launched(tile), inputs)


@CUTS
@pytest.mark.parametrize("form", FORMS)
def test_memory_around_the_operands_is_not_read(tile, form):
    inputs = make_inputs(form, 3, 18, 50)
    assert torch.equal(inputs.poisoned().launched(tile), inputs.launched(tile))


@CUTS
@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_nan_stays_alone(tile, form):
    inputs = make_inputs(form, 3, 18, 50)
    clean = inputs.launched(tile)
    inputs.x[1] = torch.nan
    found = inputs.launched(tile)
    assert found[1].isnan().all() and torch.equal(found[::2], clean[::2])


@CUTS
@pytest.mark.parametrize("token", [-1, -(2**40), 11, 2**40])
def test_a_token_outside_the_vocabulary_reads_zeros(tile, token):
    inputs = make_inputs("embed", 3, 18, 50).poisoned()
    inputs.token_ids[1] = token
    found = inputs.launched(tile)
    zeros = torch.cat([torch.zeros(25), inputs.x[1]])
    torch.testing.assert_close(found[1], inputs.weight @ zeros)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 7])
def test_the_new_residual_is_x_plus_delta(rows, dtype):
    inputs = make_inputs("delta", rows, 40, 50, dtype)
    total = norm_linear(inputs.x, inputs.delta, inputs.norm, 1e-6, inputs.weight)[0]
    # The interpreter truncates fp32 to bf16 where the hardware rounds.
    tolerance = 2**-7 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(total, inputs.x + inputs.delta, rtol=tolerance, atol=0)


def test_float16_whose_product_with_the_norms_weight_overflows():
    inputs = make_inputs("norm", 5, 20, 50, torch.float16)
    inputs.x *= 15000
    inputs.norm *= 8
    assert_within_budget(inputs.launched(DOT), inputs)


@CUTS
def test_a_row_of_zeros_is_normed_to_zeros(tile):
    inputs = make_inputs("gated", 3, 18, 50)
    inputs.x[1] = 0
    assert torch.equal(inputs.launched(tile)[1], torch.zeros(18))
