"""Grid and block sizes are the same as Triton's own functions compute."""

from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import triton

SIZES = [*range(1, 70), 127, 128, 129, 4097, 2**31 - 1, 2**31, 2**31 + 1]


def test_block_and_grid_sizes_match_triton():
    assert [next_power_of_2(size) for size in SIZES] == [triton.next_power_of_2(size) for size in SIZES]
    assert all(cdiv(size, block) == triton.cdiv(size, block) for size in (0, *SIZES) for block in (1, 2, 7, 64))


def test_size_zero_gives_block_of_one():
    assert next_power_of_2(0) == 1 and cdiv(0, 4) == 0
