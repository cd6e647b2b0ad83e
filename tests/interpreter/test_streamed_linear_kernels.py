"""The kernels of streamed_linear against float64."""

import pytest
import torch

from spec_decode.models.kernels.streamed_shares import StreamedShares, SumShares
from spec_decode.models.kernels.streamed_tiling import StreamedTiling
from tests.amid_nan import amid_nan
from tests.spec_decode.models.kernels.streamed_oracle import FORMS, assert_exact, exact, make_arguments


def tile(shares=1, block_more=0):
    return StreamedTiling(
        block_t=16, block_more=block_more, block_n=32, block_k=16, shares=shares, num_warps=4, stages=2
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float16), (5, torch.bfloat16), (18, torch.float32)])
def test_every_form_cut_by_the_device(form, rows, dtype):
    arguments = make_arguments(form, rows, 21, 300, dtype)
    assert_exact(arguments.launch(), arguments)


@pytest.mark.parametrize("shares", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [(32, 64), (37, 50)])
def test_every_form_in_whole_and_partial_tiles_and_shares(form, n, k, shares):
    arguments = make_arguments(form, 5, n, k)
    assert_exact(arguments.launch(tile(1 if form.endswith("groups") else shares)), arguments)


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("rows", [17, 32])
@pytest.mark.parametrize("form", [form for form in FORMS if not form.endswith("groups")])
def test_every_form_of_rows_in_two_parts(form, rows, shares):
    arguments = make_arguments(form, rows, 37, 50)
    assert_exact(arguments.launch(tile(shares, block_more=16)), arguments)


def test_shares_add_up_to_the_product():
    x, weight = make_arguments("plain", 5, 21, 600, torch.bfloat16)[:2]
    shares = StreamedShares(x, weight).launch()
    wanted = StreamedShares(x, weight).reference()
    assert shares.shape == wanted.shape and len(shares) > 1
    torch.testing.assert_close(shares, wanted, rtol=1e-5, atol=1e-5)


def test_the_sum_of_shares_is_added_to_the_residual():
    arguments = make_arguments("residual", 5, 21, 600, torch.bfloat16)
    shares = StreamedShares(arguments.x, arguments.weight).launch()
    assert_exact(SumShares(shares, arguments.residual).launch(), arguments)


def test_more_shares_than_tiles_of_inputs_leave_none_out():
    arguments = make_arguments("residual", 3, 32, 40)
    assert_exact(arguments.launch(tile(shares=16)), arguments)


ROWS_OF_GROUPS = {
    "one takes all": [2] * 40,
    "the first and the last": [0] * 17 + [4] * 16,
    "one each": [0, 1, 2, 3, 4],
}


@pytest.mark.parametrize("form", ["groups", "gated_groups"])
@pytest.mark.parametrize("group_of", ROWS_OF_GROUPS.values(), ids=ROWS_OF_GROUPS)
def test_groups_of_more_rows_than_a_tile_and_of_none(group_of, form):
    arguments = make_arguments(form, len(group_of), 21, 50, group_of=group_of)
    assert_exact(arguments.launch(tile()), arguments)


def test_rows_beyond_the_last_end_are_of_the_last_group():
    arguments = make_arguments("groups", 5, 21, 50)
    wanted = exact(arguments._replace(ends=torch.tensor([0, 1, 2, 3, 5]).int()))
    assert_exact(arguments._replace(ends=torch.tensor([0, 1, 2, 3, 4]).int()).launch(tile()), arguments, wanted)


@pytest.mark.parametrize("inputs", [9, 50])
@pytest.mark.parametrize("form", FORMS)
def test_memory_around_the_operands_is_not_read(form, inputs):
    arguments = make_arguments(form, 5, 37, inputs)
    poisoned = arguments._replace(**{name: amid_nan(getattr(arguments, name)) for name in arguments._fields[:6]})
    assert torch.equal(poisoned.launch(tile(2)), arguments.launch(tile(2)))


def test_rows_of_a_wider_buffer_are_read_in_place():
    arguments = make_arguments("plain", 5, 37, 50)
    wide = torch.full((5, 90), torch.nan)
    wide[:, 7:57] = arguments.x
    assert_exact(arguments._replace(x=wide[:, 7:57]).launch(tile()), arguments)


@pytest.mark.parametrize("form", ["plain", "gated", "groups"])
def test_a_row_of_nan_stays_alone(form):
    arguments = make_arguments(form, 3, 37, 50)
    clean = arguments.launch(tile())
    arguments.x[1] = torch.nan
    found = arguments.launch(tile())
    assert found[1].isnan().all() and torch.equal(found[::2], clean[::2])


def test_no_sorted_rows_give_no_result():
    arguments = make_arguments("groups", 1, 21, 50)
    empty = arguments._replace(x=arguments.x[:0], ends=torch.zeros(5, dtype=torch.int32))
    assert empty.launch().shape == (0, 21)
