"""The kernels of streamed_linear against float64."""

from dataclasses import replace

import pytest
import torch

from spec_decode.models.kernels import streamed_linear
from spec_decode.models.kernels.streamed_shares import StreamedShares, SumShares
from spec_decode.models.kernels.streamed_tiling import StreamedTiling, row_blocks
from tests.ops.questions import Placed
from tests.spec_decode.models.kernels.streamed_oracle import FORMS, assert_exact, exact, in_8_bits, make_arguments

WHOLE = [form for form in FORMS if not form.endswith("groups")]


def tile(shares=1, block_m2=0, tma=False):
    return StreamedTiling(16, block_m2, block_n=32, block_k=16, shares=shares, num_warps=4, stages=2, tma=tma)


@pytest.fixture
def tma_launches(monkeypatch):
    """What the kernel of the bulk copy engine was launched with."""
    launches, kernel = [], streamed_linear.streamed_tma_kernel

    class Spy:
        def __getitem__(self, grid):
            return lambda *args, **options: (launches.append(options), kernel[grid](*args, **options))

    monkeypatch.setattr(streamed_linear, "streamed_tma_kernel", Spy())
    return launches


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
@pytest.mark.parametrize("form", WHOLE)
def test_every_form_of_rows_in_two_parts(form, rows, shares):
    arguments = make_arguments(form, rows, 37, 50)
    assert_exact(arguments.launch(tile(shares, block_m2=16)), arguments)


@pytest.mark.parametrize("form", WHOLE)
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (33, torch.float16), (64, torch.bfloat16), (65, torch.float16), (96, torch.bfloat16), (97, torch.float16),
        (160, torch.bfloat16),
    ],
)  # fmt: skip
def test_the_copy_engine_fetches_the_tiles_of_many_rows(form, rows, dtype, tma_launches):
    arguments = make_arguments(form, rows, 37, 552, dtype)
    if form != "gated_limit" and rows > 80:
        # The tiling is the device's own, cut into shares.
        assert_exact(arguments.launch(), arguments)
        assert tma_launches[-1]["SPLIT_K"]
    # A gate without shares has half a tile for each half of the weight.
    blocks = dict(zip(("block_m", "block_m2"), row_blocks(rows), strict=True))
    assert_exact(arguments.launch(replace(tile(tma=True), **blocks)), arguments)
    assert tma_launches and not tma_launches[-1]["SPLIT_K"]


@pytest.mark.parametrize("shares", [1, 2, 3])
@pytest.mark.parametrize("rows", [5, 17, 32])
@pytest.mark.parametrize("form", WHOLE)
@pytest.mark.parametrize(("n", "k"), [(32, 64), (37, 56)])
def test_the_copy_engine_fetches_whole_and_partial_tiles_and_shares(form, rows, n, k, shares, tma_launches):
    arguments = make_arguments(form, rows, n, k)
    assert_exact(arguments.launch(tile(shares, block_m2=16, tma=True)), arguments)
    assert len(tma_launches) == 1


@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "n", "k"), [(5, 32, 64), (18, 37, 50)])
def test_every_form_in_8_bits(form, rows, n, k, shares):
    arguments = in_8_bits(make_arguments(form, rows, n, k, torch.bfloat16))
    cut = tile(1) if form.endswith("groups") else tile(shares, block_m2=16 * (rows > 16))
    assert_exact(arguments.launch(cut), arguments)
    assert_exact(arguments.launch(), arguments)


@pytest.mark.parametrize("form", WHOLE)
def test_more_rows_of_8_bits_than_a_launch_takes(form):
    arguments = in_8_bits(make_arguments(form, 163, 37, 300, torch.float16))
    assert_exact(arguments.launch(), arguments)


def of_wide_rows(x, columns, start=0):
    """The same rows as part of wider ones that hold NaN."""
    wide = torch.full((len(x), columns), torch.nan, dtype=x.dtype)
    wide[:, start : start + x.shape[1]] = x
    return wide[:, start : start + x.shape[1]]


MISALIGNED = {
    "inputs": (50, lambda x: x),
    "a start": (56, lambda x: of_wide_rows(x, 64, 1)),
    "a stride": (56, lambda x: of_wide_rows(x, 57)),
    "rows that overlap": (56, lambda x: x[:1].expand(5, -1)),
}


@pytest.mark.parametrize("form", WHOLE)
@pytest.mark.parametrize(("inputs", "change"), MISALIGNED.values(), ids=MISALIGNED)
def test_what_the_copy_engine_cannot_fetch_goes_to_the_other_kernel(form, inputs, change, tma_launches):
    arguments = make_arguments(form, 5, 37, inputs)
    arguments = arguments._replace(x=change(arguments.x))
    assert_exact(arguments.launch(tile(2, block_m2=16, tma=True)), arguments)
    assert tma_launches == []


@pytest.mark.parametrize("form", WHOLE)
def test_the_copy_engine_reads_rows_of_a_wider_buffer_and_nothing_around_them(form, tma_launches):
    arguments = make_arguments(form, 5, 37, 56)
    beside = {name: part for name in ("bias", "residual") if (part := getattr(arguments, name)) is not None}
    beside = {name: Placed(part, part.device).view for name, part in beside.items()}
    poisoned = arguments._replace(**beside, x=of_wide_rows(arguments.x, 72, 4))
    assert torch.equal(poisoned.launch(tile(tma=True)), arguments.launch(tile(tma=True))) and len(tma_launches) == 2


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


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("form", ["plain", "gated", "groups"])
def test_a_row_of_nan_stays_alone(form, tma):
    arguments = make_arguments(form, 3, 37, 56)
    cut = tile(tma=tma and form != "groups")
    clean = arguments.launch(cut)
    arguments.x[1] = torch.nan
    found = arguments.launch(cut)
    assert found[1].isnan().all() and torch.equal(found[::2], clean[::2])


def test_no_sorted_rows_give_no_result():
    arguments = make_arguments("groups", 1, 21, 50)
    empty = arguments._replace(x=arguments.x[:0], ends=torch.zeros(5, dtype=torch.int32))
    assert empty.launch().shape == (0, 21)
