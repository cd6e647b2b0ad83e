"""8-bit weights: their distance from the originals, and their products."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from attn_backends.kernels.linear import fp8_weight, streamed_linear
from attn_backends.kernels.linear.batch_invariant_linear import batch_invariant_linear
from attn_backends.kernels.linear.fp8_weight import (
    Fp8Weight,
    empty_stack,
    fill,
    is_scaled,
    joined_rows,
    reads_fp8,
    widened,
)
from attn_backends.kernels.linear.linear import gated_linear, linear
from attn_backends.kernels.linear.swiglu import swiglu
from builders.errors import BatchError
from spec_decode.graphs.dispatch_mode import PlainDispatchMode
from spec_decode.model_api import batch_invariance
from spec_decode.models.layers.linear import grouped_gated_linear, grouped_linear

HALF_A_STEP = 2.0**-4
"""Of 3 bits behind the leading one, relative to the number."""


def draw(*shape, seed=0):
    """Outputs that differ ten-thousandfold in size."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (numbers * torch.logspace(-4, 0, shape[-2])[:, None]).bfloat16()


@pytest.mark.parametrize("shape", [(37, 50), (3, 5, 8), (1, 1)])
def test_fp8_error_is_within_half_a_step(shape, monkeypatch):
    monkeypatch.setattr(fp8_weight, "_ROWS_AT_ONCE", 4)
    weight = draw(*shape)
    found = Fp8Weight.of(weight)
    assert (found.values.dtype, found.scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert found.shape == weight.shape and found.values.is_contiguous()
    assert found.nbytes == (shape[-1] + 4) * (weight.numel() // shape[-1])
    wide, error = weight.float(), (widened(found.values, found.scale) - weight.float()).abs()
    # Below the least normal number, 2^-6, steps no longer shrink.
    least = found.scale[..., None] * 2**-6
    assert (error <= HALF_A_STEP * wide.abs().maximum(least)).all()
    assert found.values.float().abs().amax(-1).eq(448).all(), "the largest number has the most that 8 bits hold"


def test_zero_outputs_and_tiny_weights_stay_finite():
    weight = torch.zeros(3, 8).bfloat16()
    weight[1, 2] = torch.finfo(torch.bfloat16).tiny
    found = Fp8Weight.of(weight)
    wide = widened(found.values, found.scale)
    assert not wide[0].any() and wide.isfinite().all() and found.scale.all()


def test_a_transposed_weight_is_stored_by_rows():
    weight = draw(8, 24).mT
    found = Fp8Weight.of(weight)
    assert found.values.is_contiguous() and torch.equal(found.values, Fp8Weight.of(weight.contiguous()).values)


def test_module_cast_keeps_fp8_weight():
    layer = nn.Module()
    layer.weight, layer.bias = Fp8Weight.of(draw(10, 8)), nn.Parameter(torch.ones(10))
    values, scale = layer.weight.values.clone(), layer.weight.scale.clone()
    assert layer.half().bias.dtype == torch.float16
    assert torch.equal(layer.weight.scale, scale) and torch.equal(layer.weight.values, values)
    moved = layer.to("meta").weight
    assert moved.values.is_meta and moved.scale.is_meta and is_scaled(moved.values, moved.scale)


class Copies(PlainDispatchMode):
    """The size of the largest tensor that is made, other than 8 bits and views of `source`."""

    def __init__(self, source):
        super().__init__()
        self.source, self.most = source, 0

    def dispatch(self, func, args, kwargs):
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if tensor.dtype != torch.float8_e4m3fn and tensor.untyped_storage().data_ptr() != self.source.data_ptr():
                self.most = max(self.most, tensor.numel())
        return out


def test_a_weight_is_never_copied_whole(monkeypatch):
    monkeypatch.setattr(fp8_weight, "_ROWS_AT_ONCE", 4)
    weight = draw(2, 20, 8)
    with Copies(weight) as copies:
        Fp8Weight.of(weight)
    # Four rows, or a scale for each of forty.
    assert copies.most == 40


@pytest.mark.parametrize("shape", [(10, 8), (3, 6, 8)])
def test_weight_is_widened_in_parts(shape, monkeypatch):
    monkeypatch.setattr(fp8_weight, "_ROWS_AT_ONCE", 4)
    weight = Fp8Weight.of(draw(*shape))
    assert torch.equal(weight.widened(torch.bfloat16), widened(weight.values, weight.scale).bfloat16())


def test_rows_and_stacks_keep_their_scales():
    first, second = Fp8Weight.of(draw(4, 8)), Fp8Weight.of(draw(6, 8, seed=1))
    rows = torch.tensor([7, 0, 9, 4])
    both = torch.cat([widened(each.values, each.scale) for each in (first, second)])
    chosen = joined_rows([first, second])[rows]
    assert torch.equal(widened(chosen.values, chosen.scale), both[rows])
    stack = empty_stack(first, 2)
    for index, each in enumerate((first, Fp8Weight.of(draw(4, 8, seed=2)))):
        fill(stack, index, each)
        assert torch.equal(widened(stack.values, stack.scale)[index], widened(each.values, each.scale))


READS = [("cuda:0", (8, 9), True), ("cuda:0", (8, 6), False), ("cpu", (0, 0), True)]


@pytest.mark.parametrize(("device", "capability", "found"), READS)
def test_old_devices_and_fp32_rows_read_no_fp8(device, capability, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert reads_fp8(torch.bfloat16, torch.device(device)) is found
    assert not reads_fp8(torch.float32, torch.device(device))


def test_slice_has_its_own_scales():
    whole = Fp8Weight.of(draw(10, 8))
    part = whole[slice(4, None)]
    assert torch.equal(widened(part.values, part.scale), widened(whole.values, whole.scale)[4:])
    assert part.values.data_ptr() == whole.values[4:].data_ptr() and whole[None].shape == (1, 10, 8)


UNSCALED = {
    "no scale": lambda weight: (weight.values, None),
    "a scale beside 16 bits": lambda weight: (weight.values.half(), weight.scale),
    "a scale for each input": lambda weight: (weight.values, weight.scale.new_ones(8)),
    "one scale": lambda weight: (weight.values, weight.scale[:1]),
    "a narrow scale": lambda weight: (weight.values, weight.scale.half()),
    "a scale with gaps": lambda weight: (weight.values, weight.scale.repeat_interleave(2)[::2]),
}


@pytest.mark.parametrize("change", UNSCALED.values(), ids=UNSCALED)
def test_fp8_weight_needs_a_scale_per_output(change):
    weight = Fp8Weight.of(draw(4, 8))
    assert is_scaled(weight.values, weight.scale) and is_scaled(weight.values.half(), None)
    values, scale = change(weight)
    assert not is_scaled(values, scale)


@pytest.mark.parametrize("rows", [1, 3, 200])
def test_products_reject_scale_of_wrong_shape(rows):
    weight, x = Fp8Weight.of(draw(4, 8)), draw(rows, 8)
    with pytest.raises(BatchError, match=r"(or an|with an) 8-bit weight (with|and) its scale"):
        linear(x, Fp8Weight(weight.values, weight.scale[:3]))
    with pytest.raises(BatchError, match="weights"):
        batch_invariant_linear(x[:, None], Fp8Weight(weight.values, weight.scale[:3])[None])


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 161, 400])
def test_any_number_of_rows_is_multiplied(rows, invariant, monkeypatch):
    monkeypatch.setattr(streamed_linear, "_WIDE_ROWS", 4)
    weight, x = Fp8Weight.of(draw(6, 8)), draw(rows, 8, seed=1) if rows else torch.zeros(0, 8).bfloat16()
    bias, residual = draw(1, 6, seed=2)[0], draw(rows, 6, seed=3) if rows else torch.zeros(0, 6).bfloat16()
    wide = x.float() @ widened(weight.values, weight.scale).T
    with batch_invariance(invariant):
        for found, wanted in (
            (linear(x, weight), wide),
            (linear(x, weight, bias, residual), wide + bias + residual),
            (gated_linear(x, weight), swiglu(wide)),
        ):
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.float(), wanted, rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize("invariant", [False, True])
def test_sorted_rows_use_weight_and_scale_of_group(invariant):
    weights, ends = Fp8Weight.of(draw(3, 6, 8) * torch.tensor([1.0, 8.0, 64.0])[:, None, None]), [1, 1, 4]
    x, tokens = draw(4, 8, seed=1), torch.arange(4)
    wide = widened(weights.values, weights.scale)[[0, 2, 2, 2]]
    wanted = torch.einsum("rk,rnk->rn", x.float(), wide)
    with batch_invariance(invariant):
        found = grouped_linear(x, weights, torch.tensor(ends).int())
        gated = grouped_gated_linear(x, tokens, weights, torch.tensor(ends).int())
    torch.testing.assert_close(found.float(), wanted, rtol=2**-6, atol=2**-7)
    torch.testing.assert_close(gated.float(), swiglu(wanted), rtol=2**-5, atol=2**-6)
