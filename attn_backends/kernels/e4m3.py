"""Rounding to e4m3, the same in torch and in a kernel, interpreted or not: clamped to its range, to nearest even.

A NaN stays one. Conversions of torch and of the hardware differ beyond 448: torch has NaN there up to 2.11, its largest
number later.
"""

from __future__ import annotations

import torch

from builders.kernels.triton_runtime import tl, triton

_LARGEST = 448.0


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x, of 16 bits or more, as float8_e4m3fn."""
    return x.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


@triton.jit
def e4m3_byte(x):
    """The e4m3 byte of x (fp32), at most 448, to nearest even; the interpreter's own conversion rounds ties up.

    Below 2^-6 steps are 2^-9, the last place of a float at 2^14: that addition rounds. Above, 20 bits are rounded off
    and the exponent's bias goes from 127 to 7.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # at most 448
    # Below 2^-6, and from there on
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # 2^14
    large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0x3C800000, small, large)  # 2^-6
    return (tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)
