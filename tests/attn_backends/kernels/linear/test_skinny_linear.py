"""Skinny linear layers on the CPU: the torch implementation, what it rejects, and the table."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_backends.kernels.linear import skinny_linear as module
from attn_backends.kernels.linear.skinny_linear import (
    MAX_ROWS,
    MAX_WIDE_ROWS,
    SkinnyLinear,
    embed_linear,
    norm_linear,
    skinny_linear,
    wide_linear,
)
from attn_backends.kernels.linear.skinny_tiling import MAX_SUMS, MIN_PROGRAMS, Tiling, tile_of, tiling
from builders.errors import BatchError
from builders.kernels.sizes import next_power_of_2
from tests.attn_backends.kernels.linear.skinny_oracle import EPS, FORMS, NARROW, assert_within_budget, make_inputs

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, MAX_ROWS])
def test_torch_implementation_of_every_form_is_right(form, rows, dtype):
    inputs = make_inputs(form, rows, 21, 50, dtype)
    assert_within_budget(inputs.call(), inputs)
    if form in NARROW and dtype != torch.float32:
        narrow = inputs.in_8_bits()
        assert_within_budget(narrow.call(), narrow)


def test_the_new_residual_is_x_plus_delta():
    inputs = make_inputs("delta", 2, 20, 50, torch.bfloat16)
    total, _ = norm_linear(inputs.x, inputs.delta, inputs.norm, EPS, inputs.weight)
    assert torch.equal(total, inputs.x + inputs.delta)


def test_residual_without_delta_is_x_itself():
    inputs = make_inputs("norm", 2, 20, 50)
    assert norm_linear(inputs.x, None, inputs.norm, EPS, inputs.weight)[0] is inputs.x


X, WEIGHT = torch.zeros(2, 8), torch.zeros(4, 8)
CALLS = {
    skinny_linear: {"x": X, "weight": WEIGHT, "residual": torch.zeros(2, 4)},
    norm_linear: {"x": X, "delta": None, "norm": torch.zeros(8), "eps": EPS, "weight": WEIGHT},
    embed_linear: {
        "token_ids": torch.zeros(2, dtype=torch.int64), "embedding": torch.zeros(5, 8), "hidden": X,
        "weight": torch.zeros(4, 16),
    },
    wide_linear: {"x": X, "weight": WEIGHT},
}  # fmt: skip
SKINNY, WIDE = "needs contiguous tensors of these sizes and one dtype.*", "a wide linear takes.*"
MISFITS = [
    (skinny_linear, {"x": torch.zeros(0, 8)}, f"1 to {MAX_ROWS} rows, got 0"),
    (skinny_linear, {"x": torch.zeros(MAX_ROWS + 1, 8)}, f"1 to {MAX_ROWS} rows, got {MAX_ROWS + 1}"),
    (skinny_linear, {"weight": torch.zeros(4, 9)}, rf"{SKINNY}weight torch.float32 \[4, 9\]"),
    (skinny_linear, {"weight": torch.zeros(4, 8).half()}, rf"{SKINNY}weight torch.float16 \[4, 8\]"),
    (skinny_linear, {"weight": torch.zeros(8, 4).T}, rf"{SKINNY}weight torch.float32 \[4, 8\]"),
    (skinny_linear, {"x": torch.zeros(8, 2).T}, rf"{SKINNY}x torch.float32 \[2, 8\]"),
    (skinny_linear, {"residual": torch.zeros(2, 5)}, rf"{SKINNY}residual torch.float32 \[2, 5\]"),
    (skinny_linear, {"residual": torch.zeros(1, 4)}, rf"{SKINNY}residual torch.float32 \[1, 4\]"),
    (norm_linear, {"delta": torch.zeros(1, 8)}, r"delta torch.float32 \[1, 8\]"),
    (norm_linear, {"delta": torch.zeros(8, 2).T}, r"delta torch.float32 \[2, 8\]"),
    (norm_linear, {"norm": torch.zeros(9)}, r"norm torch.float32 \[9\]"),
    (norm_linear, {"norm": torch.zeros(16)[::2]}, r"needs contiguous tensors .* norm torch.float32 \[8\]"),
    (norm_linear, {"weight": torch.zeros(5, 8), "gated": True}, r"weight torch.float32 \[5, 8\]"),
    (embed_linear, {"token_ids": torch.zeros(4, dtype=torch.int64)[::2]}, r"needs contiguous tensors .* token_ids"),
    (embed_linear, {"token_ids": torch.zeros(3, dtype=torch.int64)}, r"token_ids torch.int64 \[3\]"),
    (embed_linear, {"token_ids": torch.zeros(2, dtype=torch.int32)}, r"token_ids torch.int32 \[2\]"),
    (embed_linear, {"embedding": torch.zeros(5, 9)}, r"embedding torch.float32 \[5, 9\]"),
    (embed_linear, {"hidden": torch.zeros(2, 7)}, r"x torch.float32 \[2, 7\]"),
    (wide_linear, {"weight": torch.zeros(4, 8).half()}, rf"{WIDE}weight torch.float16 \[4, 8\]"),
    (wide_linear, {"weight": torch.zeros(4, 9)}, rf"{WIDE}weight torch.float32 \[4, 9\]"),
    (wide_linear, {"weight": torch.zeros(8)}, rf"{WIDE}weight torch.float32 \[8\]"),
    (wide_linear, {"x": torch.zeros(1, 2, 8)}, rf"{WIDE}x torch.float32 \[1, 2, 8\]"),
    (wide_linear, {"x": torch.zeros(2, 8).int()}, rf"{WIDE}x torch.int32 \[2, 8\]"),
]


@pytest.mark.parametrize(("function", "change", "message"), MISFITS)
def test_misfit_operands_are_named(function, change, message):
    with pytest.raises(BatchError, match=message):
        function(**{**CALLS[function], **change})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["wide", "wide_norm"])
def test_wide_linear_of_many_rows_is_right(form, dtype):
    inputs = make_inputs(form, MAX_WIDE_ROWS + 3, 24, 50, dtype)
    assert_within_budget(inputs.call(), inputs)


@pytest.mark.parametrize(
    "change", [{}, {"rows": MAX_WIDE_ROWS + 1}, {"strided": True}, {"transposed": True}, {"gradient": True}], ids=str
)
def test_wide_linear_uses_kernel_for_few_readable_rows(change, monkeypatch):
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


def test_wide_linear_of_no_rows_is_empty():
    assert wide_linear(torch.zeros(0, 8).half(), torch.zeros(4, 8), norm_eps=EPS).shape == (0, 4)


@pytest.mark.parametrize("rows", [1, MAX_WIDE_ROWS + 1])
def test_a_wide_linear_stays_wide_under_autocast(rows):
    inputs = make_inputs("wide_norm", rows, 24, 50)
    with torch.autocast("cpu", torch.bfloat16):
        assert_within_budget(inputs.call(), inputs)


@pytest.mark.outside_inference_mode
def test_a_wide_linear_has_a_gradient():
    x = torch.randn(2, 8, requires_grad=True)
    wide_linear(x, torch.randn(4, 8), norm_eps=EPS).sum().backward()
    assert x.grad.abs().min() > 0


@given(
    st.integers(1, 4), st.integers(1, 300000), st.integers(1, 40000), st.booleans(), st.sampled_from([2, 4])
)  # fmt: skip
def test_every_tiling_fits_gpu_shared_memory(rows, n, k, gated, itemsize):
    tile = tiling(rows, n, k, gated=gated, itemsize=itemsize)
    height = next_power_of_2(rows)
    for size in (tile.block_n, tile.block_k):
        assert size & (size - 1) == 0 and size > 0
    weights = 2 if gated else 1
    assert height * weights * tile.block_n * tile.block_k <= MAX_SUMS * 32 * tile.num_warps
    assert tile.block_n == 1 or n >= tile.block_n * MIN_PROGRAMS
    if tile.stages > 1:
        # Besides the weights: x, what is added to it, and the norm's weight.
        assert tile.stages * itemsize * tile.block_k * (weights * tile.block_n + 2 * height + 1) <= 99 * 1024


MEASURED = {
    (1, 1536, 1024, False): (2, 1024, 4),
    (1, 1024, 1024, False): (2, 1024, 4),
    (1, 32000, 1024, False): (4, 512, 2),
    (1, 2816, 1024, True): (2, 1024, 4),
    (1, 1024, 2816, False): (1, 1024, 8),
    (1, 64000, 2880, False): (8, 512, 4, 3),
    (1, 17280, 2880, True): (4, 512, 2, 3),
    (1, 2880, 17280, False): (1, 2048, 8),
    (1, 6144, 4096, False): (2, 2048, 8),
    (1, 128256, 4096, False): (2, 2048, 8),
    (1, 14336, 4096, True): (4, 1024, 4, 3),
    (1, 6144, 8192, False): (1, 2048, 8),
    (1, 4096, 14336, False): (1, 2048, 8),
    (2, 32000, 1024, False): (4, 512, 2),
    (2, 2816, 1024, True): (2, 512, 2, 3),
    (2, 64000, 2880, False): (8, 256, 2, 3),
    (2, 6144, 4096, False): (4, 512, 2, 3),
    (2, 128256, 4096, False): (8, 256, 2, 3),
    (2, 14336, 4096, True): (2, 512, 2, 3),
    (3, 1536, 1024, False): (2, 512, 2),
    (4, 1024, 2048, False): (2, 1024, 4),
    (4, 1024, 2816, False): (2, 1024, 4),
}
FEW_OUTPUTS = {
    (1, 24, 16384): (1, 16384, 16),
    (3, 24, 16384): (1, 16384, 16),
    (4, 256, 4096): (1, 4096, 16),
    (1, 64, 28672): (1, 16384, 16),
    (3, 64, 28672): (1, 4096, 16),
}
"""Of these all inputs are loaded at once, or as many as registers hold."""


def test_measured_layers_have_their_fastest_tiling():
    found = {(rows, n, k, gated): tiling(rows, n, k, gated=gated) for rows, n, k, gated in MEASURED}
    assert found == {layer: Tiling(*tile) for layer, tile in MEASURED.items()}
    found = {layer: tile_of(*layer, itemsize=4) for layer in FEW_OUTPUTS}
    assert found == {layer: Tiling(*tile) for layer, tile in FEW_OUTPUTS.items()}
    assert tile_of(1, 257, 4096, itemsize=4) == tiling(1, 257, 4096, itemsize=4)
