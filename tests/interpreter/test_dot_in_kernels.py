"""A product inside an interpreted kernel: what every comparison of bits in this folder stands on."""

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


def test_each_element_is_the_sum_of_its_terms_in_their_order():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(SIZE.value, SIZE.value, generator=generator) for _ in range(2))
    found, wanted = torch.empty_like(left), torch.zeros_like(left)
    product_kernel[(1,)](left, right, found)
    for term in range(SIZE.value):
        wanted = wanted + left[:, term, None] * right[term]
    assert torch.equal(found, wanted)
    assert not torch.equal(found, left @ right)
