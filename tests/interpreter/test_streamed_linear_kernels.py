"""The streamed_linear kernels compared with float64."""

import math
from dataclasses import replace

import pytest
import torch

from attn_backends.kernels.linear import streamed_linear
from attn_backends.kernels.linear.streamed_shares import StreamedShares, SumShares
from attn_backends.kernels.linear.streamed_tiling import StreamedTiling, row_blocks, streamed_tiling
from benchmarks import random_product, tune_streamed_linear
from builders.devices import Room, room_of
from tests.attn_backends.kernels.linear.streamed_oracle import FORMS, assert_exact, exact, in_8_bits, make_arguments
from tests.factories import CPU
from tests.ops.questions import Placed

WHOLE = [form for form in FORMS if not form.endswith("groups")]
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def tile(shares=1, block_m2=0, tma=False):
    return StreamedTiling(16, block_m2, block_n=32, block_k=16, shares=shares, num_warps=4, stages=2, tma=tma)


CUTS = {
    "one row, by the device": (1, 21, 300, FP16, None),
    "a few rows, by the device": (5, 21, 300, BF16, None),
    "rows in two parts, by the device": (18, 21, 300, FP32, None),
    "whole tiles": (5, 32, 64, FP32, tile()),
    "partial tiles": (5, 37, 50, FP32, tile()),
    "whole tiles, two shares": (5, 32, 64, FP32, tile(2)),
    "partial tiles, three shares": (5, 37, 50, FP32, tile(3)),
    "a part and a row": (17, 37, 50, FP32, tile(1, 16)),
    "two whole parts, two shares": (32, 37, 50, FP32, tile(2, 16)),
    "more shares than tiles of inputs": (3, 32, 40, BF16, tile(16)),
    "copied, whole tiles": (5, 32, 64, FP32, tile(1, 16, tma=True)),
    "copied, a part and a row, three shares": (17, 32, 64, FP32, tile(3, 16, tma=True)),
    "copied, partial tiles": (32, 37, 56, FP32, tile(1, 16, tma=True)),
    "copied, partial tiles, two shares": (5, 37, 56, FP32, tile(2, 16, tma=True)),
}


def takes(form, narrow, cut):
    """Rows sorted by group are in no shares, no second part and not copied; a weight of 8 bits is not copied."""
    return cut is None or not ((narrow and cut.tma) or (form not in WHOLE and cut != tile()))


ROUNDED = {
    "one row, by the device": (1, 21, 300, BF16, None),
    "rows in two parts, by the device": (70, 21, 300, FP16, None),
    "copied, by the device": (130, 21, 304, BF16, None),
    "partial tiles": (5, 37, 50, BF16, tile()),
    "partial tiles, three shares": (5, 37, 50, FP16, tile(3)),
    "two whole parts, two shares": (32, 37, 50, BF16, tile(2, 16)),
    "copied, a part and a row": (17, 37, 80, FP16, replace(tile(1, 16, tma=True), block_k=32)),
    "copied, two shares": (17, 37, 80, BF16, replace(tile(2, 16, tma=True), block_k=32)),
}
"""Of rows that are rounded to 8 bits."""

CASES = [
    pytest.param(form, bits, *cut, id=f"{form}-{bits}-{name}")
    for form in FORMS
    for bits, cuts in {"16 bits": CUTS, "fp8": CUTS, "rounded": ROUNDED}.items()
    for name, cut in cuts.items()
    if takes(form, bits == "fp8", cut[-1])
]


@pytest.fixture
def tma_launches(monkeypatch):
    """What the kernel of the bulk copy engine was launched with."""
    launches, kernel = [], streamed_linear.streamed_tma_kernel

    class Spy:
        def __getitem__(self, grid):
            return lambda *args, **options: (launches.append(options), kernel[grid](*args, **options))

    monkeypatch.setattr(streamed_linear, "streamed_tma_kernel", Spy())
    return launches


@pytest.mark.parametrize(("form", "bits", "rows", "n", "k", "dtype", "cut"), CASES)
def test_every_streamed_form_is_right_in_every_tiling(form, bits, rows, n, k, dtype, cut, tma_launches):
    arguments = make_arguments(form, rows, n, k, BF16 if bits == "fp8" and dtype is FP32 else dtype)
    arguments = arguments if bits == "16 bits" else in_8_bits(arguments)._replace(round_x=bits == "rounded")
    assert_exact(arguments.launch(cut), arguments)
    # A gate that is neither split nor fills the device has tiles of 64, which the copy engine would halve.
    assert len(tma_launches) == (cut.tma if cut else rows == 130 and form in WHOLE and not arguments.gated)


@pytest.mark.parametrize(("form", "rows"), [*((form, 163) for form in WHOLE), ("residual", 258)])
def test_fp8_rows_beyond_one_launch_are_right(form, rows, tma_launches):
    arguments = in_8_bits(make_arguments(form, rows, 37, 64, FP16))._replace(round_x=rows == 258)
    assert_exact(arguments.launch(), arguments)
    assert [each["M"] for each in tma_launches] == [256] * (rows == 258)


@pytest.mark.parametrize("rows", [161, 256])
def test_sixteen_bit_gate_takes_more_rows_per_launch(rows, tma_launches):
    arguments = make_arguments("gated_limit", rows, 37, 136, BF16)
    of_many_outputs = streamed_tiling(rows, 28672, 136, room_of(CPU), gated=True)
    assert_exact(arguments.launch(of_many_outputs), arguments)
    assert [(each["BLOCK_M"] + each["BLOCK_M2"] >= rows, each["M"]) for each in tma_launches] == [(True, rows)]


@pytest.mark.parametrize("form", WHOLE)
@pytest.mark.parametrize(("rows", "dtype"), [(33, FP16), (65, FP16), (96, BF16), (97, FP16), (160, BF16)])
def test_tma_loads_tiles_of_many_rows(form, rows, dtype, tma_launches):
    arguments = make_arguments(form, rows, 37, 552 if rows in (96, 97) else 136, dtype)
    if form != "gated_limit" and rows in (96, 97):
        # The tiling is the device's own, cut into shares.
        assert_exact(arguments.launch(), arguments)
        assert tma_launches[-1]["SPLIT_K"]
    # A gate without shares has half a tile for each half of the weight.
    blocks = dict(zip(("block_m", "block_m2"), row_blocks(rows), strict=True))
    assert_exact(arguments.launch(replace(tile(tma=True), **blocks)), arguments)
    assert tma_launches and not tma_launches[-1]["SPLIT_K"]


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
def test_misaligned_operands_use_kernel_without_tma(form, inputs, change, tma_launches):
    arguments = make_arguments(form, 5, 37, inputs)
    arguments = arguments._replace(x=change(arguments.x))
    assert_exact(arguments.launch(tile(2, block_m2=16, tma=True)), arguments)
    assert tma_launches == []


@pytest.mark.parametrize("form", WHOLE)
def test_tma_reads_only_its_rows_of_wider_buffer(form, tma_launches):
    arguments = make_arguments(form, 5, 37, 56)
    beside = {name: part for name in ("bias", "residual") if (part := getattr(arguments, name)) is not None}
    beside = {name: Placed(part, part.device).view for name, part in beside.items()}
    poisoned = arguments._replace(**beside, x=of_wide_rows(arguments.x, 72, 4))
    assert torch.equal(poisoned.launch(tile(tma=True)), arguments.launch(tile(tma=True))) and len(tma_launches) == 2


def test_sum_of_shares_is_added_to_residual():
    arguments = make_arguments("residual", 5, 21, 600, torch.bfloat16)
    shares = StreamedShares(arguments.x, arguments.weight).launch()
    assert_exact(SumShares(shares, arguments.residual).launch(), arguments)


ROWS_OF_GROUPS = {
    "one takes all": [2] * 40,
    "the first and the last": [0] * 17 + [4] * 16,
    "one each": [0, 1, 2, 3, 4],
}


@pytest.mark.parametrize("form", ["groups", "gated_groups"])
@pytest.mark.parametrize("group_of", ROWS_OF_GROUPS.values(), ids=ROWS_OF_GROUPS)
def test_groups_larger_than_tile_and_empty_are_right(group_of, form):
    arguments = make_arguments(form, len(group_of), 21, 50, group_of=group_of)
    assert_exact(arguments.launch(tile()), arguments)


def test_rows_after_last_end_belong_to_last_group():
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


def test_no_sorted_rows_give_empty_result():
    arguments = make_arguments("groups", 1, 21, 50)
    empty = arguments._replace(x=arguments.x[:0], ends=torch.zeros(5, dtype=torch.int32))
    assert empty.launch().shape == (0, 21)


@pytest.mark.parametrize("bits", [8, 16])
def test_tuner_tries_tilings_and_notices_a_wrong_one(bits, monkeypatch):
    for module in (random_product, tune_streamed_linear):
        monkeypatch.setattr(module, "DEVICE", CPU)
    monkeypatch.setattr(tune_streamed_linear, "_PROGRAMS", ((64, 4),))
    monkeypatch.setattr(tune_streamed_linear, "_SHARES", (1, 4))
    shape = tune_streamed_linear.StreamedProduct(34, 40, 64, True, bits)
    tilings = tune_streamed_linear.compiled(shape)
    assert tilings == shape.tilings() and len({(tile.block_k, tile.shares, tile.tma) for tile in tilings}) > 3
    launch = streamed_linear.StreamedLinear.launch
    monkeypatch.setattr(streamed_linear.StreamedLinear, "launch", lambda self, tile: launch(self, tile) * math.e)
    with pytest.raises(AssertionError):
        tune_streamed_linear.compiled(shape)


KEPT = [(8, (64, 128), (4,)), (64, (64, 128, 256), (4, 8)), (256, (128,), (8,))]


@pytest.mark.parametrize(("rows", "block_n", "warps"), KEPT)
def test_tuner_skips_tilings_that_cannot_be_best(rows, block_n, warps, monkeypatch):
    room = Room(132, 232448)
    monkeypatch.setattr(tune_streamed_linear, "room_of", lambda device: room)
    own, *others = tune_streamed_linear.StreamedProduct(rows, 4096, 4096, False, 8).tilings()
    assert own == streamed_tiling(rows, 4096, 4096, room, itemsize=1, x_itemsize=1) and own not in others
    assert {each.block_n for each in others} == {*block_n} and {each.num_warps for each in others} == {*warps}
    assert {each.tma for each in others} == ({False, True} if rows == 64 else {rows > 64})
    for tile in others:
        assert tile.stages * (tile.block_n + max(16, rows)) * tile.block_k <= room.shared_memory
        assert 60 <= tile.shares * 4096 / tile.block_n <= 198
    assert len(others) < 50
    gates = tune_streamed_linear.StreamedProduct(rows, 8192, 4096, True, 8).tilings()[1:]
    assert gates and not [tile for tile in gates if tile.tma and tile.block_n == 64]
