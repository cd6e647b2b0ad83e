"""Which kernel multiplies: by the number of rows, the weight, and what our kernels cannot read or record."""

import pytest
import torch

from attn_backends.kernels.linear import linear as linear_module
from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from attn_backends.kernels.linear.linear import gated_linear, linear
from attn_backends.kernels.linear.product_kind import ProductKind, product_kind
from attn_backends.kernels.linear.streamed_tiling import MAX_ROWS
from attn_backends.kernels.linear.streamed_tiling import ROWS_OF_ANY_WEIGHT as MOST
from attn_backends.kernels.linear.swiglu import swiglu
from builders.devices import num_sms
from spec_decode.model_api import batch_invariance

SKINNY, STREAMED, TORCH = ProductKind.SKINNY, ProductKind.STREAMED, ProductKind.TORCH
WEIGHT = torch.zeros(4, 8).half()
NARROW, LARGE = Fp8Weight.of(WEIGHT), torch.zeros(3 << 17, 8).half()


def rows(count, dtype=torch.float16):
    return torch.zeros(count, 8, dtype=dtype)


BY_ROWS = {
    "16 bits": (WEIGHT, {}, {0: TORCH, 1: SKINNY, 2: SKINNY, 3: STREAMED, MOST: STREAMED, MOST + 1: TORCH}),
    "a large weight": (LARGE, {}, {1: SKINNY, 2: STREAMED}),
    "one that is not yet large": (LARGE[1:], {}, {1: SKINNY, 2: SKINNY}),
    "32 bits": (WEIGHT.float(), {}, {1: SKINNY, 2: SKINNY, 3: TORCH}),
    "what the skinny kernel does not do": (WEIGHT, {"skinny": False}, {1: STREAMED, 2: STREAMED}),
    "8 bits": (NARROW, {}, {0: STREAMED, 1: SKINNY, 2: SKINNY, 3: STREAMED, MAX_ROWS + 1: STREAMED}),
    "8 bits, and not the skinny kernel": (NARROW, {"skinny": False}, dict.fromkeys((0, 1, 3, MAX_ROWS + 1), STREAMED)),
}


@pytest.mark.parametrize(("weight", "options", "kinds"), BY_ROWS.values(), ids=BY_ROWS)
def test_row_count_and_weight_choose_product_kind(weight, options, kinds):
    dtype = torch.float16 if weight is NARROW else weight.dtype
    assert {count: product_kind(rows(count, dtype), weight, **options) for count in kinds} == kinds


def test_gate_streams_more_rows_than_plain_weight():
    x = rows(MAX_ROWS)
    weight = torch.zeros(64 * (num_sms(x.device) + 1), 8).half()
    assert product_kind(x, weight, gated=True) is STREAMED and product_kind(x, weight) is TORCH


UNREADABLE = {
    "two dtypes": (rows(3), WEIGHT.bfloat16()),
    "sequences": (rows(3)[None], WEIGHT),
    "a transposed weight": (rows(3), torch.zeros(8, 4).half().T),
    "rows that are not adjacent": (torch.zeros(8, 3).half().T, WEIGHT),
}


@pytest.mark.parametrize("count", [1, 3])
def test_unsupported_operands_use_torch(count):
    found = {name: product_kind(x[:count], weight) for name, (x, weight) in UNREADABLE.items()}
    assert found == dict.fromkeys(UNREADABLE, TORCH)
    with torch.autocast("cpu", torch.bfloat16):
        assert product_kind(rows(count), WEIGHT) is TORCH
    with torch.enable_grad():
        assert product_kind(rows(count), WEIGHT) is TORCH and product_kind(rows(count), NARROW) is not TORCH


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_batch_invariance_overrides_product_kind(count):
    with batch_invariance(True):
        assert product_kind(rows(count), WEIGHT) is ProductKind.BATCH_INVARIANT


def test_gate_pads_rows_that_torch_multiplies_slowly(monkeypatch):
    """Torch is slower with 320 and 448 rows than with 8 more."""
    counts = []
    monkeypatch.setattr(linear_module, "linear", lambda x, weight: counts.append(len(x)) or linear(x, weight))
    weight = torch.randn(6, 8)
    for count in (256, 320, 321, 448):
        x = torch.randn(count, 8)
        torch.testing.assert_close(gated_linear(x, weight), swiglu(x @ weight.T))
    assert counts == [256, 328, 321, 456]
