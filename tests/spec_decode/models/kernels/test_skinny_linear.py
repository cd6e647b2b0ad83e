"""Skinny linear layers on the CPU: the torch implementation, what is refused, and the table."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders.errors import BatchError
from spec_decode.models.kernels import skinny_linear as module
from spec_decode.models.kernels.skinny_linear import (
    MAX_ROWS,
    MAX_WIDE_ROWS,
    SkinnyLinear,
    embed_linear,
    norm_linear,
    skinny_linear,
    wide_linear,
)
from spec_decode.models.kernels.skinny_tiling import MAX_SUMS, MIN_PROGRAMS, Tiling, power_of_two, tile_of, tiling
from tests.spec_decode.models.kernels.skinny_oracle import EPS, FORMS, NARROW, assert_within_budget, make_inputs

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, MAX_ROWS])
@torch.no_grad()
def test_the_torch_implementation_of_every_form(form, rows, dtype):
    inputs = make_inputs(form, rows, 21, 50, dtype)
    assert_within_budget(inputs.call(), inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("rows", [1, MAX_ROWS])
@torch.no_grad()
def test_the_torch_implementation_of_every_form_in_8_bits(form, rows, dtype):
    inputs = make_inputs(form, rows, 21, 50, dtype).in_8_bits()
    assert_within_budget(inputs.call(), inputs)


def test_the_new_residual_is_x_plus_delta():
    inputs = make_inputs("delta", 2, 20, 50, torch.bfloat16)
    total, _ = norm_linear(inputs.x, inputs.delta, inputs.norm, EPS, inputs.weight)
    assert torch.equal(total, inputs.x + inputs.delta)


def test_without_a_delta_x_itself_is_the_residual():
    inputs = make_inputs("norm", 2, 20, 50)
    assert norm_linear(inputs.x, None, inputs.norm, EPS, inputs.weight)[0] is inputs.x


@pytest.mark.parametrize("rows", [0, MAX_ROWS + 1])
def test_more_or_fewer_rows_are_refused(rows):
    with pytest.raises(BatchError, match=f"1 to {MAX_ROWS} rows, got {rows}"):
        skinny_linear(torch.zeros(rows, 8), torch.zeros(4, 8))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"weight": torch.zeros(4, 9)}, r"weight torch.float32 \[4, 9\]"),
        ({"weight": torch.zeros(4, 8).half()}, r"weight torch.float16 \[4, 8\]"),
        ({"weight": torch.zeros(8, 4).T}, r"weight torch.float32 \[4, 8\]"),
        ({"x": torch.zeros(8, 2).T}, r"x torch.float32 \[2, 8\]"),
        ({"residual": torch.zeros(2, 5)}, r"residual torch.float32 \[2, 5\]"),
        ({"residual": torch.zeros(1, 4)}, r"residual torch.float32 \[1, 4\]"),
    ],
)
def test_operands_that_do_not_fit_are_named(change, found):
    operands = {"x": torch.zeros(2, 8), "weight": torch.zeros(4, 8), "residual": torch.zeros(2, 4)}
    with pytest.raises(BatchError, match=f"needs contiguous tensors of one dtype.*{found}"):
        skinny_linear(**{**operands, **change})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"delta": torch.zeros(1, 8)}, r"delta torch.float32 \[1, 8\]"),
        ({"delta": torch.zeros(8, 2).T}, r"delta torch.float32 \[2, 8\]"),
        ({"norm": torch.zeros(9)}, r"norm torch.float32 \[9\]"),
    ],
)
def test_norms_that_do_not_fit_are_named(change, found):
    operands = {"x": torch.zeros(2, 8), "delta": None, "norm": torch.zeros(8), "eps": EPS, "weight": torch.zeros(4, 8)}
    with pytest.raises(BatchError, match=found):
        norm_linear(**{**operands, **change})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"token_ids": torch.zeros(3, dtype=torch.int64)}, r"token_ids torch.int64 \[3\]"),
        ({"token_ids": torch.zeros(2, dtype=torch.int32)}, r"token_ids torch.int32 \[2\]"),
        ({"embedding": torch.zeros(5, 9)}, r"embedding torch.float32 \[5, 9\]"),
        ({"hidden": torch.zeros(2, 7)}, r"x torch.float32 \[2, 7\]"),
    ],
)
def test_embeddings_that_do_not_fit_are_named(change, found):
    operands = {"token_ids": torch.zeros(2, dtype=torch.int64), "embedding": torch.zeros(5, 8)}
    operands |= {"hidden": torch.zeros(2, 8), "weight": torch.zeros(4, 16)}
    with pytest.raises(BatchError, match=found):
        embed_linear(**{**operands, **change})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["wide", "wide_norm"])
def test_a_wide_linear_of_many_rows(form, dtype):
    inputs = make_inputs(form, MAX_WIDE_ROWS + 3, 24, 50, dtype)
    assert_within_budget(inputs.call(), inputs)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rows": MAX_WIDE_ROWS + 1},
        {"strided": True},
        {"transposed": True},
        {"gradient": True},
    ],
    ids=str,
)
def test_the_kernel_takes_a_wide_linear_of_few_rows_that_it_can_read(change, monkeypatch):
    def kernel(*arguments):
        calls.append(arguments)
        return SkinnyLinear(*arguments).reference()

    calls = []
    monkeypatch.setattr(module, "_skinny_linear", kernel)
    inputs = make_inputs("wide_norm", change.get("rows", MAX_WIDE_ROWS), 24, 50, torch.bfloat16)
    if "strided" in change:
        inputs.x = inputs.x.repeat_interleave(2, 1)[:, ::2]
    if "transposed" in change:
        inputs.weight = inputs.weight.T.contiguous().T
    with torch.set_grad_enabled("gradient" in change):
        assert_within_budget(inputs.call(), inputs)
    assert bool(calls) is (not change)


@torch.no_grad()
def test_a_wide_linear_of_no_rows():
    assert wide_linear(torch.zeros(0, 8).half(), torch.zeros(4, 8), norm_eps=EPS).shape == (0, 4)


@pytest.mark.parametrize("rows", [1, MAX_WIDE_ROWS + 1])
@torch.no_grad()
def test_a_wide_linear_stays_wide_under_autocast(rows):
    inputs = make_inputs("wide_norm", rows, 24, 50)
    with torch.autocast("cpu", torch.bfloat16):
        assert_within_budget(inputs.call(), inputs)


def test_a_wide_linear_has_a_gradient():
    x = torch.randn(2, 8, requires_grad=True)
    wide_linear(x, torch.randn(4, 8), norm_eps=EPS).sum().backward()
    assert x.grad.abs().min() > 0


@pytest.mark.parametrize(
    ("x", "weight", "found"),
    [
        (torch.zeros(2, 8), torch.zeros(4, 8).half(), r"weight torch.float16 \[4, 8\]"),
        (torch.zeros(2, 8), torch.zeros(4, 9), r"weight torch.float32 \[4, 9\]"),
        (torch.zeros(2, 8), torch.zeros(8), r"weight torch.float32 \[8\]"),
        (torch.zeros(1, 2, 8), torch.zeros(4, 8), r"x torch.float32 \[1, 2, 8\]"),
        (torch.zeros(2, 8).int(), torch.zeros(4, 8), r"x torch.int32 \[2, 8\]"),
    ],
)
def test_wide_operands_that_do_not_fit_are_named(x, weight, found):
    with pytest.raises(BatchError, match=f"a wide linear takes.*{found}"):
        wide_linear(x, weight)


@given(
    st.integers(1, 4), st.integers(1, 300000), st.integers(1, 40000), st.booleans(), st.sampled_from([2, 4])
)  # fmt: skip
def test_every_tiling_fits_a_gpu(rows, n, k, gated, itemsize):
    tile = tiling(rows, n, k, gated=gated, itemsize=itemsize)
    height = power_of_two(rows)
    for size in (tile.block_n, tile.block_k):
        assert size & (size - 1) == 0 and size > 0
    weights = 2 if gated else 1
    assert height * weights * tile.block_n * tile.block_k <= MAX_SUMS * 32 * tile.num_warps
    assert tile.block_n == 1 or n >= tile.block_n * MIN_PROGRAMS
    if tile.stages > 1:
        # Besides the weights: x, what is added to it, and the norm's weight.
        assert tile.stages * itemsize * tile.block_k * (weights * tile.block_n + 2 * height + 1) <= 99 * 1024


@pytest.mark.parametrize(
    ("rows", "n", "k", "gated", "tile"),
    [
        (1, 1536, 1024, False, Tiling(2, 1024, 4)),
        (1, 1024, 1024, False, Tiling(2, 1024, 4)),
        (1, 32000, 1024, False, Tiling(4, 512, 2)),
        (1, 2816, 1024, True, Tiling(2, 1024, 4)),
        (1, 1024, 2816, False, Tiling(1, 1024, 8)),
        (1, 64000, 2880, False, Tiling(8, 512, 4, 3)),
        (1, 17280, 2880, True, Tiling(4, 512, 2, 3)),
        (1, 2880, 17280, False, Tiling(1, 2048, 8)),
        (1, 6144, 4096, False, Tiling(2, 2048, 8)),
        (1, 128256, 4096, False, Tiling(2, 2048, 8)),
        (1, 14336, 4096, True, Tiling(4, 1024, 4, 3)),
        (1, 6144, 8192, False, Tiling(1, 2048, 8)),
        (1, 4096, 14336, False, Tiling(1, 2048, 8)),
        (2, 32000, 1024, False, Tiling(4, 512, 2)),
        (2, 2816, 1024, True, Tiling(2, 512, 2, 3)),
        (2, 64000, 2880, False, Tiling(8, 256, 2, 3)),
        (2, 6144, 4096, False, Tiling(4, 512, 2, 3)),
        (2, 128256, 4096, False, Tiling(8, 256, 2, 3)),
        (2, 14336, 4096, True, Tiling(2, 512, 2, 3)),
        (3, 1536, 1024, False, Tiling(2, 512, 2)),
        (4, 1024, 2048, False, Tiling(2, 1024, 4)),
        (4, 1024, 2816, False, Tiling(2, 1024, 4)),
    ],
)
def test_a_layer_that_was_measured_has_its_fastest_tiling(rows, n, k, gated, tile):
    assert tiling(rows, n, k, gated=gated) == tile


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tile"),
    [
        (1, 24, 16384, Tiling(1, 16384, 16)),
        (3, 24, 16384, Tiling(1, 16384, 16)),
        (4, 256, 4096, Tiling(1, 4096, 16)),
        (1, 64, 28672, Tiling(1, 16384, 16)),
        (3, 64, 28672, Tiling(1, 4096, 16)),
        (1, 257, 4096, tiling(1, 257, 4096, itemsize=4)),
    ],
)
def test_a_few_outputs_load_all_of_their_inputs_at_once_or_what_registers_hold(rows, outputs, inputs, tile):
    assert tile_of(rows, outputs, inputs, itemsize=4) == tile
