"""Warming up compiles every kernel that any number of rows launches, for GPUs that this machine does not have."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from triton import knobs

from attn_backends.kernels.linear import warm_up as warming
from attn_backends.kernels.linear.linear_op import LinearArguments, linear_op
from attn_backends.kernels.linear.product_kind import ProductKind
from attn_backends.kernels.linear.top_tokens import TopTokens, top_tokens
from attn_backends.kernels.linear.warm_up import by_variant, warm_up
from builders.chips import CHIPS
from tests.chips import on_chip

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
MOST = 330
"""More rows than any of our kernels takes at once."""
CASES = {
    "16 bits": (6144, 4096, BF16, None),
    "16 bits of many inputs": (4096, 8192, BF16, None),
    "a bias": (4608, 3584, BF16, "bias"),
    "8 bits": (4096, 14336, FP8, None),
    "8 bits of many outputs": (28672, 4096, FP8, None),
    "8 bits and a bias": (4608, 3584, FP8, "bias"),
    "8 bits that torch does not multiply": (1000, 1000, FP8, None),
    "a draft's head": (128256, 4096, BF16, "head"),
    "a draft's head in 8 bits": (32000, 2880, FP8, "head"),
}
TARGETS = ["sm_89", "sm_90", "sm_100"]


@pytest.fixture(params=TARGETS)
def keys(request):
    """Take "meta" for a chip, and list the name and Triton's key of each kernel launched, without compiling it."""
    chip, found = next(chip for chip in CHIPS if chip.target == request.param), []

    def seen(*, key, fn, **rest):
        found.append((fn.name, key))
        return True

    with on_chip(chip), patch.object(knobs.runtime, "jit_cache_hook", seen), torch.no_grad():
        yield found


@pytest.fixture(params=CASES.values(), ids=CASES)
def product(request, keys, monkeypatch):
    """The op and its record without rows."""
    monkeypatch.setattr(warming, "_warm", set())
    n, k, dtype, part = request.param
    weight, x = torch.empty(n, k, dtype=dtype, device="meta"), torch.empty(0, k, dtype=BF16, device="meta")
    scale = torch.empty(n, device="meta") if dtype == FP8 else None
    if part == "head":
        return top_tokens, TopTokens(x, weight, scale, n - 200)
    bias = None if part is None else torch.empty(n, dtype=BF16, device="meta")
    return linear_op, LinearArguments(x, weight, scale, bias)


def serve(op, record, keys, counts=range(1, MOST)):
    """Multiply each number of rows, and return the kernels launched."""
    keys.clear()
    rows = torch.empty(MOST, record.x.shape[1], dtype=BF16, device="meta")
    for count in counts:
        op(*record._replace(x=rows[:count]))
    return set(keys)


def is_torchs(record, count):
    """Whether torch multiplies this number of rows."""
    kind = record._replace(x=torch.empty(count, record.x.shape[1], dtype=BF16, device="meta")).variant()
    return kind in (ProductKind.TORCH, ProductKind.NARROW)


def test_no_number_of_rows_launches_a_kernel_that_was_not_warm(product, keys):
    warm_up(*product)
    warm = set(keys)
    assert serve(*product, keys) == warm


HOPPER = pytest.mark.parametrize("keys", ["sm_90"], indirect=True)


@HOPPER
def test_leaving_out_a_number_of_rows_leaves_a_kernel_cold(product, keys):
    """Each is launched for a kernel of its own, unless torch multiplies."""
    op, record = product
    counts = [len(part.x) for part in by_variant(record)]
    launched = {count: serve(op, record, keys, [count]) for count in counts}
    for count in counts:
        others = set().union(*(launched[other] for other in counts if other != count))
        assert launched[count] - others or is_torchs(record, count), count


@HOPPER
@pytest.mark.parametrize("product", [CASES["a bias"]], indirect=True)
def test_a_shape_is_warmed_once(product, keys):
    op, record = product
    warm_up(op, record)
    keys.clear()
    warm_up(op, record)
    assert not keys
    warm_up(op, record._replace(bias=None))
    assert keys


def test_a_cpu_compiles_nothing(monkeypatch):
    record = LinearArguments(torch.zeros(0, 8).bfloat16(), torch.zeros(4, 8).bfloat16(), None, None)
    warm_up(lambda *parts: pytest.fail("launched"), record)
