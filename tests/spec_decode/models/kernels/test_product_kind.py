"""Which kernel multiplies: by the number of rows, the weight, and what our kernels cannot read or record."""

import pytest
import torch

from builders.paged import num_sms
from spec_decode.models.kernels.batch_invariance import batch_invariance
from spec_decode.models.kernels.fp8_weight import Fp8Weight
from spec_decode.models.kernels.product_kind import ProductKind, product_kind
from spec_decode.models.kernels.streamed_tiling import MAX_ROWS
from spec_decode.models.kernels.streamed_tiling import ROWS_OF_ANY_WEIGHT as MOST

SKINNY, STREAMED, TORCH = ProductKind.SKINNY, ProductKind.STREAMED, ProductKind.TORCH
WEIGHT = torch.zeros(4, 8).half()


def rows(count, dtype=torch.float16):
    return torch.zeros(count, 8, dtype=dtype)


@pytest.mark.parametrize(
    ("count", "kind"),
    [
        (0, TORCH),
        (1, SKINNY),
        (2, SKINNY),
        (3, STREAMED),
        (MOST, STREAMED),
        (MOST + 1, TORCH),
    ],
)
@torch.no_grad()
def test_the_number_of_rows_decides(count, kind):
    assert product_kind(rows(count), WEIGHT) is kind


@pytest.mark.parametrize(("count", "kind"), [(1, SKINNY), (2, STREAMED)])
@torch.no_grad()
def test_two_rows_of_a_large_weight_are_streamed(count, kind):
    assert product_kind(rows(count), torch.zeros(3 << 17, 8).half()) is kind
    assert product_kind(rows(count), torch.zeros((3 << 17) - 1, 8).half()) is SKINNY


@pytest.mark.parametrize(("count", "kind"), [(1, SKINNY), (2, SKINNY), (3, TORCH)])
@torch.no_grad()
def test_weights_of_32_bits_are_not_streamed(count, kind):
    assert product_kind(rows(count, torch.float32), WEIGHT.float()) is kind


@pytest.mark.parametrize("count", [1, 2])
@torch.no_grad()
def test_few_rows_with_what_the_skinny_kernel_does_not_do_are_streamed(count):
    assert product_kind(rows(count), WEIGHT, skinny=False) is STREAMED


@torch.no_grad()
def test_more_rows_are_streamed_of_a_gate_than_of_the_same_weight_without():
    x = rows(MAX_ROWS)
    weight = torch.zeros(64 * (num_sms(x.device) + 1), 8).half()
    assert product_kind(x, weight, gated=True) is STREAMED and product_kind(x, weight) is TORCH


@pytest.mark.parametrize(
    ("count", "kind"), [(0, STREAMED), (1, SKINNY), (2, SKINNY), (3, STREAMED), (MAX_ROWS + 1, STREAMED)]
)
def test_a_weight_of_8_bits_is_never_torchs(count, kind):
    assert product_kind(rows(count), Fp8Weight.of(WEIGHT)) is kind
    assert product_kind(rows(count), Fp8Weight.of(WEIGHT), skinny=False) is STREAMED


UNREADABLE = {
    "two dtypes": (rows(3), WEIGHT.bfloat16()),
    "sequences": (rows(3)[None], WEIGHT),
    "a transposed weight": (rows(3), torch.zeros(8, 4).half().T),
    "rows that are not adjacent": (torch.zeros(8, 3).half().T, WEIGHT),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("x", "weight"), UNREADABLE.values(), ids=UNREADABLE)
@torch.no_grad()
def test_what_our_kernels_would_misread_is_torchs(x, weight, count):
    assert product_kind(x[:count], weight) is TORCH


@pytest.mark.parametrize("count", [1, 3])
def test_rows_that_may_need_a_gradient_are_torchs(count):
    assert product_kind(rows(count), WEIGHT) is TORCH


@pytest.mark.parametrize("count", [1, 3])
@torch.no_grad()
def test_rows_under_autocast_are_torchs(count):
    with torch.autocast("cpu", torch.bfloat16):
        assert product_kind(rows(count), WEIGHT) is TORCH


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_batch_invariance_goes_before_all(count):
    with batch_invariance(True):
        assert product_kind(rows(count), WEIGHT) is ProductKind.BATCH_INVARIANT
