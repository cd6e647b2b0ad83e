"""Operations inside an interpreted kernel: every bitwise comparison in this folder depends on them."""

import math
import warnings

import torch
import triton
import triton.language as tl

SIZE: tl.constexpr = tl.constexpr(64)


@triton.jit
def product_kernel(left_ptr, right_ptr, found_ptr):
    places = tl.arange(0, SIZE)
    square = places[:, None] * SIZE + places[None]
    found = tl.dot(tl.load(left_ptr + square), tl.load(right_ptr + square))
    tl.store(found_ptr + square, found)


def test_dot_sums_terms_in_order():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(SIZE.value, SIZE.value, generator=generator) for _ in range(2))
    found, wanted = torch.empty_like(left), torch.zeros_like(left)
    product_kernel[(1,)](left, right, found)
    for term in range(SIZE.value):
        wanted = wanted + left[:, term, None] * right[term]
    assert torch.equal(found, wanted)
    assert not torch.equal(found, left @ right)


@triton.jit
def log_and_inverse_kernel(x_ptr):
    x = tl.load(x_ptr)
    tl.store(x_ptr + 1, tl.log2(x))
    tl.store(x_ptr + 2, 1 / x)


def test_log_and_inverse_of_zero_do_not_warn():
    found = torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log_and_inverse_kernel[(1,)](found)
    assert found.tolist() == [0, -math.inf, math.inf]


@triton.jit
def numbers_kernel(found_ptr, x_ptr):
    x = tl.load(x_ptr)
    count, block = x.to(tl.int32), x + tl.zeros((2,), tl.float32)
    tl.store(found_ptr, x * 3 + count * 3 + tl.sum(block * 3))
    tl.store(found_ptr + 1, x.to(tl.float16) / (x + 1).to(tl.float16))
    tl.store(found_ptr + 2, count * 0.25 + count // 3)


def test_numbers_broadcast_and_half_quotients_are_floats():
    found = torch.zeros(3)
    numbers_kernel[(1,)](found, torch.full((1,), 2.0))
    assert torch.equal(found, torch.tensor([24, 2 / 3, 0.5]))
