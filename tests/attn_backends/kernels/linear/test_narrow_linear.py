"""Products of many rows with an 8-bit weight, which round the rows to 8 bits too."""

import pytest
import torch

from attn_backends.kernels.linear import narrow_linear as narrow
from attn_backends.kernels.linear.fp8_weight import Fp8Weight, widened
from attn_backends.kernels.linear.linear import gated_linear, linear
from attn_backends.kernels.linear.narrow_rows import narrow_rows
from attn_backends.kernels.linear.product_kind import ProductKind, product_kind
from attn_backends.kernels.linear.streamed_tiling import MAX_NARROW_ROWS
from attn_backends.kernels.linear.swiglu import swiglu
from builders.devices import Room
from spec_decode.model_api import batch_invariance
from spec_decode.models.layers.linear import ResidualLinear, grouped_gated_linear, grouped_linear, joined

MANY, STREAMED = narrow.MAX_WIDE_ROWS + 1, ProductKind.NARROW_STREAMED


@pytest.fixture(autouse=True)
def supported(monkeypatch):
    """The CPU has torch's product, but only for one weight."""

    def by_group(rows, weight, scale, outputs, *, offs, out_dtype, use_fast_accum):
        groups = torch.searchsorted(offs[:-1].long(), torch.arange(len(rows)), right=True)
        wide = torch.einsum("rk,rkn->rn", rows.float(), weight.float()[groups])
        return (wide * scale[:, None] * outputs[groups]).to(out_dtype)

    monkeypatch.setattr(narrow, "_has_narrow_products", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", by_group)


def draw(*shape, seed=0, dtype=torch.bfloat16):
    """Rows that differ a thousandfold in size."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (numbers * torch.logspace(-3, 0, shape[-2])[:, None]).to(dtype)


def exact(x, weight):
    """The product of the rounded rows, in fp32."""
    values, scale = narrow_rows(x)
    return widened(values, scale), widened(weight.values, weight.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_rounded_by_at_most_half_a_step(dtype):
    x = draw(70, 48, dtype=dtype)
    x[5] = 0
    values, scale = narrow_rows(x)
    assert (values.dtype, scale.dtype, scale.shape) == (torch.float8_e4m3fn, torch.float32, (70,))
    wide, error = x.float(), (widened(values, scale) - x.float()).abs()
    assert (error <= 2.0**-4 * wide.abs().maximum(scale[:, None] * 2**-6)).all()
    assert values.float().abs().amax(-1).eq(448).sum() == 69 and not values[5].float().any()


by_torch = pytest.mark.xfail(
    torch.__version__.startswith("2.9."), reason="torch 2.9 has one scale for all 8-bit rows on a CPU", strict=True
)


@pytest.mark.parametrize("rows", [MANY, pytest.param(MAX_NARROW_ROWS + 1, marks=by_torch)])
def test_nan_and_infinity_stay_in_their_rows(rows):
    x, weight = draw(rows, 32), Fp8Weight.of(draw(16, 32, seed=1))
    x[3, 1], x[8, 2] = torch.nan, torch.inf
    out = linear(x, weight)
    assert out.isnan().any(-1).nonzero().flatten().tolist() == [3, 8]


BY_ROWS = [
    (MANY, STREAMED),
    pytest.param(narrow.STREAMED_ROWS_OF_ANY_WEIGHT + 1, ProductKind.NARROW, marks=by_torch),
]


@pytest.mark.parametrize(("count", "kind"), BY_ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_rows_are_multiplied_in_8_bits(dtype, count, kind):
    x, weight = draw(count, 32, dtype=dtype), Fp8Weight.of(draw(48, 32, seed=1))
    bias, residual = draw(1, 48, seed=2, dtype=dtype)[0], draw(count, 48, seed=3, dtype=dtype)
    assert product_kind(x, weight) is kind
    rows, wide = exact(x, weight)
    wanted = rows @ wide.T
    for found, sums in (
        (linear(x, weight), wanted),
        (linear(x, weight, bias, residual), wanted + bias + residual),
        (gated_linear(x, weight, 0.5), swiglu(wanted, 0.5)),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), sums, rtol=2**-6, atol=2**-7)
    # And their rounding shows, so that this is not another kernel's result.
    assert (linear(x, weight).float() - x.float() @ wide.T).norm() > 0.01 * wanted.norm()


@pytest.mark.parametrize(("inputs", "shares"), [(1280, 2), (512, None)])
def test_residual_layer_leaves_shares_of_rounded_rows_to_next_norm(inputs, shares):
    layer, x, residual = ResidualLinear(inputs, 48), draw(MANY, inputs), draw(MANY, 48, seed=3)
    del layer.weight
    layer.weight = Fp8Weight.of(draw(48, inputs, seed=1))
    with torch.no_grad():
        found, delta = layer(x, residual)
    assert (shares, MANY, 48) == tuple(delta.shape) if shares else delta is None
    rows, wide = exact(x, layer.weight)
    torch.testing.assert_close(joined(found, delta).float(), residual + rows @ wide.T, rtol=2**-7, atol=2**-7)


def test_sorted_rows_are_multiplied_in_8_bits(monkeypatch):
    monkeypatch.setattr("spec_decode.models.layers.linear.MAX_WIDE_SORTED_ROWS", 5)
    weights = Fp8Weight.of(draw(3, 32, 16) * torch.tensor([1.0, 8.0, 64.0])[:, None, None])
    x, ends, groups = draw(6, 16, seed=1), torch.tensor([2, 2, 6]).int(), [0, 0, 2, 2, 2, 2]
    rows, wide = exact(x, weights)
    found = grouped_linear(x, weights, ends)
    torch.testing.assert_close(found.float(), torch.einsum("rk,rnk->rn", rows, wide[groups]), rtol=2**-7, atol=1e-4)
    tokens = torch.tensor([5, 0, 3, 3, 1, 2])
    wanted = swiglu(torch.einsum("rk,rnk->rn", rows[tokens], wide[groups]))
    found = grouped_gated_linear(x, tokens, weights, ends)
    torch.testing.assert_close(found.float(), wanted, rtol=2**-5, atol=2**-6)


KEPT = {
    "few rows": (draw(MANY - 1, 32), (48, 32)),
    "fp32 rows": (draw(MANY, 32, dtype=torch.float32), (48, 32)),
    "outputs that torch cannot multiply": (draw(MANY, 32), (40, 32)),
    "inputs that torch cannot multiply": (draw(MANY, 24), (48, 24)),
}


@pytest.mark.parametrize(("x", "shape"), KEPT.values(), ids=KEPT)
def test_other_rows_keep_their_bits(x, shape):
    weight = Fp8Weight.of(draw(*shape, seed=1))
    assert product_kind(x, weight) is ProductKind.STREAMED
    wanted = x.float() @ widened(weight.values, weight.scale).T
    torch.testing.assert_close(linear(x, weight).float(), wanted, rtol=2**-7, atol=1e-5)


MOST_STREAMED = {
    "any weight": (128, 240, False, 128),
    "twice as many inputs as outputs": (128, 256, False, 256),
    "and many outputs": (192, 384, False, 128),
    "a gate": (192, 240, True, 256),
}


@pytest.mark.parametrize(("n", "k", "gated", "most"), MOST_STREAMED.values(), ids=MOST_STREAMED)
def test_rounded_rows_stream_as_far_as_they_beat_torch(n, k, gated, most, monkeypatch):
    monkeypatch.setattr(narrow, "room_of", lambda device: Room(2, 232448))
    x, weight = draw(most + 1, k), Fp8Weight.of(draw(n, k))
    kinds = [product_kind(x[:rows], weight, gated=gated) for rows in (16, 17, most, most + 1)]
    assert kinds == [ProductKind.STREAMED, STREAMED, STREAMED, ProductKind.NARROW]


@pytest.mark.parametrize(("n", "most"), [(128, 64), (192, 32)])
@pytest.mark.parametrize("gated", [False, True])
def test_without_wgmma_rounded_rows_are_torchs(n, most, gated, monkeypatch):
    monkeypatch.setattr(narrow, "room_of", lambda device: Room(2, 232448, wgmma=False))
    x, weight = draw(most + 1, 512), Fp8Weight.of(draw(n, 512))
    kinds = [product_kind(x[:rows], weight, gated=gated) for rows in (most, most + 1)]
    assert kinds == [ProductKind.STREAMED, ProductKind.NARROW]


def test_batch_invariant_rows_keep_their_bits():
    x, weight = draw(MANY, 32), Fp8Weight.of(draw(48, 32, seed=1))
    with batch_invariance(True):
        assert product_kind(x, weight) is ProductKind.BATCH_INVARIANT


@pytest.mark.parametrize(
    ("device", "capability", "found"),
    [("cpu", (9, 0), False), ("cuda:0", (8, 9), False), ("cuda:1", (9, 0), True), ("cuda:2", (12, 0), False)],
)
def test_devices_without_these_products_keep_16_bit_rows(device, capability, found, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    narrow._has_narrow_products.cache_clear()
    assert narrow._has_narrow_products(torch.device(device)) is found
    narrow._has_narrow_products.cache_clear()
