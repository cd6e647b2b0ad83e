"""Streamed linear layers on the CPU: the torch implementation, what it rejects, and tiles."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from attn_backends.kernels.linear import streamed_linear as streamed_linear_module
from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from attn_backends.kernels.linear.streamed_linear import (
    StreamedLinear,
    num_shares,
    streamed_groups,
    streamed_linear,
)
from attn_backends.kernels.linear.streamed_shares import streamed_shares, sum_shares
from attn_backends.kernels.linear.streamed_tiling import (
    MAX_GATED_ROWS,
    MAX_ROWS,
    ROWS_OF_ANY_WEIGHT,
    StreamedTiling,
    most_rows,
    row_blocks,
    streamed_tiling,
)
from builders.devices import Room
from builders.errors import BatchError
from tests.attn_backends.kernels.linear.streamed_oracle import (
    FORMS,
    LIMIT,
    assert_exact,
    in_8_bits,
    make_arguments,
)

H200 = Room(num_sms=132, shared_memory=232448)


def call(arguments):
    """By the public function of the form."""
    x, weight, ends, tokens, bias, residual, gated, limit, scale, alpha, round_x = arguments
    weight = weight if scale is None else Fp8Weight(weight, scale)
    if ends is None:
        return streamed_linear(x, weight, bias, residual, gated=gated, limit=limit, round_x=round_x)
    return streamed_groups(x, weight, ends, tokens, bias=bias, gated=gated, limit=limit, alpha=alpha)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 7])
def test_torch_implementation_of_every_form_is_right(form, rows, dtype):
    arguments = make_arguments(form, rows, 21, 50, dtype)
    assert_exact(call(arguments), arguments)
    if dtype != torch.float32:
        # More rows than a launch takes, too.
        narrow = in_8_bits(arguments if rows == 1 else make_arguments(form, MAX_ROWS + 1, 21, 50, dtype))
        assert_exact(call(narrow), narrow)
        if narrow.ends is None:
            rounded = narrow._replace(round_x=True)
            assert_exact(call(rounded), rounded)
            assert not torch.equal(call(rounded), call(narrow))


def test_too_many_rows_have_one_share():
    x, weight = torch.zeros(MAX_ROWS + 1, 1280).half(), Fp8Weight.of(torch.zeros(21, 1280).half())
    assert num_shares(x, weight) == 1 and num_shares(x[1:], weight) > 1
    assert num_shares(x, weight, round_x=True) > 1 and num_shares(x.repeat(2, 1), weight, round_x=True) == 1


MORE_ROWS = {
    "a gate of many outputs": (28672, 4096, True, MAX_GATED_ROWS),
    "one whose tiles fill less of the device": (24576, 4096, True, MAX_ROWS),
    "one that also leaves less room for two programs": (34560, 2880, True, ROWS_OF_ANY_WEIGHT),
    "a gate of few": (5632, 4096, True, ROWS_OF_ANY_WEIGHT),
    "half as many outputs as inputs": (4096, 8192, False, MAX_ROWS),
    "fewer": (1536, 4096, False, MAX_ROWS),
    "more": (2112, 4096, False, ROWS_OF_ANY_WEIGHT),
    "few inputs": (1024, 2816, False, ROWS_OF_ANY_WEIGHT),
    "outputs that leave less of the device idle": (6144, 4096, False, ROWS_OF_ANY_WEIGHT),
    "many inputs": (4096, 14336, False, ROWS_OF_ANY_WEIGHT),
    "too few inputs for shares": (4096, 504, False, ROWS_OF_ANY_WEIGHT),
    "a gate of few that is cut into shares": (2048, 4096, True, MAX_ROWS),
    "rows that the copy engine cannot fetch": (2048, 4100, False, ROWS_OF_ANY_WEIGHT),
    "many outputs": (128256, 4096, False, ROWS_OF_ANY_WEIGHT),
}


@pytest.mark.parametrize(("n", "k", "gated", "most"), MORE_ROWS.values(), ids=MORE_ROWS)
def test_most_rows_matches_measured_layers(n, k, gated, most):
    assert most_rows(n, k, H200, gated=gated) == most
    assert most_rows(n, k, replace(H200, tma=False), gated=gated) == ROWS_OF_ANY_WEIGHT


def test_shares_add_up_to_the_product():
    x, weight = make_arguments("plain", 5, 21, 600, torch.bfloat16)[:2]
    shares = streamed_shares(x, weight)
    assert shares.dtype == torch.float32 and shares.shape == (num_shares(x, weight), 5, 21) and len(shares) > 1
    torch.testing.assert_close(shares.sum(0), x.float() @ weight.float().T)


def test_summed_shares_and_residual_are_rounded_once():
    arguments = make_arguments("residual", 5, 21, 600, torch.bfloat16)
    assert_exact(sum_shares(streamed_shares(arguments.x, arguments.weight), arguments.residual), arguments)


def test_misfit_shares_are_rejected():
    with pytest.raises(BatchError, match=r"weight torch.float16 \[4, 8\]"):
        streamed_shares(HALF[:, :7], torch.zeros(4, 8).half())


@pytest.mark.parametrize(
    ("rows", "blocks"),
    [
        (1, (16, 0)), (17, (32, 0)), (64, (64, 0)), (65, (64, 16)), (80, (64, 16)), (81, (64, 32)), (97, (128, 0)),
        (129, (128, 16)), (160, (128, 32)), (192, (128, 64)), (193, (256, 0)), (256, (256, 0)),
    ],
)  # fmt: skip
def test_rows_are_split_into_one_or_two_blocks(rows, blocks):
    tile = streamed_tiling(rows, 4096, 4096, H200)
    assert (tile.block_m, tile.block_m2) == blocks


HALF = torch.zeros(3, 8).half()


ROWS = f"1 to {MAX_ROWS} rows, got "
ENDS = torch.tensor([1, 3]).int()
MISFITS = {
    "no rows": ({"x": torch.zeros(0, 8)}, rf"{ROWS}0\."),
    "more rows": ({"x": torch.zeros(MAX_ROWS + 1, 8)}, rf"{ROWS}{MAX_ROWS + 1}\."),
    "more rows of a gate": (
        {"x": torch.zeros(MAX_GATED_ROWS + 1, 8).half(), "weight": HALF.new_zeros(4, 8), "gated": True},
        rf"1 to {MAX_GATED_ROWS} rows, got {MAX_GATED_ROWS + 1}\.",
    ),
    "more rows of a gate of 32 bits": (
        {"x": torch.zeros(MAX_ROWS + 1, 8), "gated": True},
        rf"{ROWS}{MAX_ROWS + 1}\.",
    ),
    "inputs": ({"weight": torch.zeros(4, 9)}, r"weight torch.float32 \[4, 9\]"),
    "dtype": ({"weight": torch.zeros(4, 8).half()}, r"weight torch.float16 \[4, 8\]"),
    "a weight that is not contiguous": ({"weight": torch.zeros(8, 4).T}, r"weight torch.float32 \[4, 8\]"),
    "rows that are not adjacent": ({"x": torch.zeros(8, 3).T}, r"x torch.float32 \[3, 8\]"),
    "bias": ({"bias": torch.zeros(5)}, r"bias torch.float32 \[5\]"),
    "residual": ({"residual": torch.zeros(2, 4)}, r"residual torch.float32 \[2, 4\]"),
    "the residual's dtype": ({"residual": torch.zeros(3, 4).half()}, r"residual torch.float16 \[3, 4\]"),
    "a gate of an odd number of rows": ({"weight": torch.zeros(5, 8), "gated": True}, r"weight torch.float32 \[5, 8\]"),
    "a gate with a bias": ({"bias": torch.zeros(2), "gated": True}, r"bias torch.float32 \[2\]"),
    "no inputs": ({"x": torch.zeros(3, 0), "weight": torch.zeros(4, 0)}, r"weight torch.float32 \[4, 0\]"),
    "no outputs": ({"weight": torch.zeros(0, 8)}, r"weight torch.float32 \[0, 8\]"),
    "a stack of weights": ({"weight": torch.zeros(2, 4, 8)}, r"weight torch.float32 \[2, 4, 8\]"),
    "ends of another number": ({"ends": torch.zeros(3).int()}, r"ends torch.int32 \[3\]"),
    "ends of another dtype": ({"ends": ENDS.long()}, r"ends torch.int64 \[2\]"),
    "tokens of another dtype": ({"ends": ENDS, "tokens": torch.zeros(3).int()}, r"tokens torch.int32 \[3\]"),
    "no weights": ({"ends": ENDS[:0], "weight": torch.zeros(0, 4, 8)}, r"weight torch.float32 \[0, 4, 8\]"),
    "rows to round for a weight of 16 bits": (
        {"x": HALF, "weight": HALF, "round_x": True},
        r"x torch.float16 and weight torch.float16\.",
    ),
    "rows of 32 bits to round": ({"weight": Fp8Weight.of(HALF), "round_x": True}, r"x torch.float32 and weight .*e4m3"),
    "one bias for groups": ({"ends": ENDS, "bias": torch.zeros(4)}, r"bias torch.float32 \[4\]"),
    "one weight for groups": ({"ends": ENDS, "weight": torch.zeros(4, 8)}, r"weight torch.float32 \[4, 8\]"),
}


@pytest.mark.parametrize(("change", "message"), MISFITS.values(), ids=MISFITS)
def test_misfit_tensors_are_named(change, message):
    function, height = (streamed_groups, (2, 4)) if "ends" in change else (streamed_linear, (4,))
    with pytest.raises(BatchError, match=message):
        function(**{"x": torch.zeros(3, 8), "weight": torch.zeros(*height, 8), **change})


@pytest.mark.parametrize(("form", "name"), [("plain", "limit"), ("groups", "limit"), ("groups", "alpha")])
def test_an_activation_without_a_gate_is_refused(form, name):
    arguments = make_arguments(form, 3, 4, 8)._replace(**{name: LIMIT})
    with pytest.raises(BatchError, match=rf"got {name}=0\.7 with gated=False\. Pass gated=True, or no {name}"):
        call(arguments)


def test_nan_gate_stays_nan_under_limit():
    arguments = make_arguments("gated_limit", 2, 3, 8)
    arguments.x[1] = torch.nan
    found = streamed_linear(arguments.x, arguments.weight, gated=True, limit=LIMIT)
    assert found[1].isnan().all() and found[0].isfinite().all()


@given(
    rows=st.integers(1, MAX_GATED_ROWS), n=st.integers(1, 300000), k=st.integers(1, 40000),
    groups=st.sampled_from([0, 8]), itemsizes=st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 2), (4, 4)]),
    gated=st.booleans(), room=st.sampled_from([H200, Room(108, 166912), Room(8, 101376)]),
)  # fmt: skip
@example(rows=129, n=1, k=1, groups=0, itemsizes=(2, 2), gated=False, room=Room(8, 101376))
def test_every_tiling_fits_its_device(rows, n, k, groups, itemsizes, gated, room):
    itemsize, x_itemsize = itemsizes
    tile = streamed_tiling(rows, n, k, room, groups=groups, itemsize=itemsize, x_itemsize=x_itemsize, gated=gated)
    size = (tile.block_m + tile.block_m2) * x_itemsize + tile.block_n * itemsize
    assert tile.stages * size * tile.block_k <= room.shared_memory
    assert tile.block_m + tile.block_m2 >= (1 if groups else rows)
    programs, blocks = tile.shares * -(-n // tile.block_n), -(-k // tile.block_k)
    assert tile.stages > 1 and (tile.shares == 1 or blocks >= 2 * tile.shares)
    assert tile.shares == 1 or programs <= (8 if itemsize == 1 else 1) * room.num_sms


@pytest.mark.parametrize(
    ("rows", "n", "k", "shares", "stages"),
    [
        (32, 4096, 8192, 2, 6), (32, 6144, 4096, 1, 6), (32, 132 * 64, 4096, 1, 6), (4, 1024, 2816, 8, 6),
        (16, 1024, 2816, 4, 6), (32, 1024, 2048, 4, 6), (32, 640, 7168, 11, 6), (4, 1536, 4096, 5, 6),
        (16, 28672, 4096, 1, 4), (4, 128256, 4096, 1, 4),
    ],
)  # fmt: skip
def test_measured_layer_has_its_fastest_tiling(rows, n, k, shares, stages):
    tile = streamed_tiling(rows, n, k, H200)
    assert (tile.tma, tile.block_n, tile.block_k, tile.shares, tile.stages) == (False, 64, 128, shares, stages)


@pytest.mark.parametrize(
    ("rows", "n", "k", "block_n", "warps", "block_k", "shares", "stages"),
    [
        (8, 6144, 4096, 32, 2, 256, 4, 3), (8, 4096, 4096, 64, 2, 256, 4, 5), (16, 28672, 4096, 64, 2, 256, 1, 3),
        (8, 4096, 14336, 64, 2, 256, 4, 5), (8, 128256, 4096, 64, 2, 256, 1, 3), (32, 6144, 4096, 64, 4, 128, 4, 5),
        (32, 4096, 4096, 64, 4, 256, 2, 3), (32, 28672, 4096, 64, 2, 256, 1, 3), (32, 4096, 14336, 64, 4, 256, 2, 5),
        (64, 6144, 4096, 64, 4, 128, 4, 3), (64, 4096, 4096, 64, 4, 256, 2, 3),
    ],
)  # fmt: skip
def test_measured_layer_in_8_bits_has_fastest_tiling(rows, n, k, block_n, warps, block_k, shares, stages):
    tile = streamed_tiling(rows, n, k, H200, itemsize=1)
    assert tile == StreamedTiling(row_blocks(rows)[0], 0, block_n, block_k, shares, warps, stages)


@pytest.mark.parametrize(
    ("rows", "n", "k", "block_n", "shares", "stages"),
    [
        (32, 6144, 4096, 128, 2, 6), (33, 6144, 4096, 64, 1, 6), (160, 6144, 4096, 64, 1, 6),
        (161, 6144, 4096, 128, 2, 5), (32, 4096, 4096, 128, 4, 6), (64, 4096, 4096, 64, 2, 6),
        (256, 4096, 4096, 128, 4, 4), (32, 4096, 14336, 128, 4, 6), (128, 4096, 14336, 64, 2, 6),
        (32, 28672, 4096, 128, 1, 4), (64, 28672, 4096, 128, 1, 4), (128, 28672, 4096, 128, 1, 3),
        (256, 28672, 4096, 128, 1, 4), (32, 16896, 4096, 128, 1, 6),
        (32, 5120, 4096, 128, 2, 6), (32, 8448, 1024, 128, 1, 6),
        # Tiles of 128 would leave more than half of the SMs idle.
        (32, 1024, 2816, 64, 4, 6), (32, 512, 14336, 64, 8, 6), (256, 1024, 2816, 128, 4, 4),
    ],
)  # fmt: skip
def test_measured_layer_of_rows_in_8_bits_has_fastest_tiling(rows, n, k, block_n, shares, stages):
    tile = streamed_tiling(rows, n, k, H200, itemsize=1, x_itemsize=1)
    tma, warps = rows > 32, 8 if rows > 160 else 4
    assert tile == StreamedTiling(*row_blocks(rows), block_n, 128, shares, warps, stages, tma)
    for inputs, room in ((k + 8, H200), (k, replace(H200, tma=False))):
        assert not streamed_tiling(rows, n, inputs, room, itemsize=1, x_itemsize=1).tma


@pytest.mark.parametrize(
    ("rows", "n", "k", "tma"), [(128, 5632, 1024, False), (128, 4096, 4096, True), (256, 5632, 1024, True)]
)
def test_copy_engine_halves_no_tile_of_64_for_a_gate(rows, n, k, tma):
    found = [streamed_tiling(rows, n, k, H200, itemsize=1, x_itemsize=1, gated=gated) for gated in (True, False)]
    assert found == [replace(found[1], tma=tma), replace(found[1], tma=True)]


@pytest.mark.parametrize(
    ("rows", "n", "k", "gated", "expected"),
    [
        (81, 4096, 8192, False, (64, 128, 2, 5)), (96, 6144, 4096, False, (64, 128, 1, 5)),
        (97, 4096, 14336, False, (64, 64, 2, 6)), (160, 4096, 4096, True, (64, 64, 2, 6)),
        (96, 128256, 4096, False, (128, 64, 1, 4)), (160, 128256, 4096, False, (128, 64, 1, 3)),
        (96, 28672, 4096, True, (128, 64, 1, 3)), (160, 28672, 4096, True, (128, 64, 1, 3)),
        (161, 28672, 4096, True, (128, 64, 1, 4)), (256, 28672, 4096, True, (128, 64, 1, 4)),
    ],
)  # fmt: skip
def test_measured_layer_of_many_rows_has_fastest_tiling(rows, n, k, gated, expected):
    tile = streamed_tiling(rows, n, k, H200, gated=gated)
    assert tile.tma and (tile.block_n, tile.block_k, tile.shares, tile.stages) == expected
    assert tile.num_warps == (8 if rows > 192 else 4)


BY_THREADS = {
    "no copy engine": (96, 4096, 4096, {"room": replace(H200, tma=False)}),
    "rows that it cannot fetch": (96, 4096, 4100, {}),
    "a gate whose tiles would be of 32 rows": (96, 5632, 4096, {"gated": True}),
    "groups": (96, 28672, 4096, {"groups": 8}),
    "another dtype": (96, 28672, 4096, {"itemsize": 4}),
    "8 bits": (96, 28672, 4096, {"itemsize": 1}),
    "few rows": (80, 28672, 4096, {}),
    "few rows of a program alone": (80, 4096, 4096, {}),
}


@pytest.mark.parametrize(("rows", "n", "k", "options"), BY_THREADS.values(), ids=BY_THREADS)
def test_tiling_without_tma_suits_other_kernel(rows, n, k, options):
    tile = streamed_tiling(rows, n, k, **{"room": H200, **options})
    assert not tile.tma and (tile.block_n, tile.block_k) == (64, min(128, 256 // options.get("itemsize", 2)))


def test_grid_axes_fit_rows_of_long_prompt(monkeypatch):
    grids = []

    class Spy:
        def __getitem__(self, grid):
            return lambda **options: grids.append(grid)

    monkeypatch.setattr(streamed_linear_module, "streamed_kernel", Spy())
    rows = 8192 * 8
    x, weight = torch.zeros(8192, 16).half(), torch.zeros(8, 200, 16).half()
    ends, tokens = torch.full((8,), rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    StreamedLinear(x, weight, ends, tokens).launch()
    assert grids == [(rows * 4, 1)], "CUDA's second axis and third have 65,535 programs at most"


def test_few_inputs_are_not_split_into_shares():
    assert streamed_tiling(4, 64, 300, H200).shares == 1
