"""Rounding to e4m3, identical in torch and in a kernel, interpreted or not: clamped to its range, to nearest even.

NaN stays NaN. torch's conversion and the hardware's differ beyond 448: torch gives NaN up to 2.11, later its maximum.
"""

from __future__ import annotations

import torch

from builders.devices import converts_fp8
from builders.kernels.triton_runtime import tl, triton

_LARGEST = 448.0


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Convert x, of 16 bits or more, to float8_e4m3fn."""
    return x.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """View a cache of e4m3 as uint8, which every chip stores; others as they are."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


def to_widen(cache: torch.Tensor) -> torch.Tensor:
    """View a cache as `widened` reads it: e4m3 as bytes on chips that cannot convert it."""
    return cache if converts_fp8(cache.device) else as_bytes(cache)


@triton.jit
def widened(x, DTYPE: tl.constexpr):
    """Convert x to DTYPE, of 16 bits or more: exact for e4m3, and for bytes that hold it.

    The bits of e4m3 are those of an fp32 with another bias: 2^-120 of the number, also below 2^-6.
    """
    if x.dtype == tl.uint8:
        TWO_TO_120: tl.constexpr = 1.329227995784916e36
        code = x.to(tl.int32)
        fp32 = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * TWO_TO_120
        return tl.where((code & 0x7F) == 0x7F, float("nan"), fp32).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def e4m3_byte(x):
    """Return the e4m3 byte of x (fp32), clamped to 448, to nearest even; the interpreter's conversion rounds ties up.

    Below 2^-6 steps are 2^-9, the last place of a float at 2^14 = 16384: that addition rounds. Above, 20 bits are
    rounded off and the exponent's bias changes from 127 to 7. 0x7F is NaN, 0x80 the sign.
    """
    FP32_ABS: tl.constexpr = 0x7FFFFFFF  # all bits but the sign
    BITS_448: tl.constexpr = 0x43E00000  # as fp32, like those below
    BITS_2_14: tl.constexpr = 0x46800000
    BITS_2_MINUS_6: tl.constexpr = 0x3C800000  # e4m3's smallest normal number
    bits = x.to(tl.int32, bitcast=True)
    abs_bits = tl.minimum(bits & FP32_ABS, BITS_448)
    subnormal = (abs_bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - BITS_2_14
    normal = ((abs_bits + 0x7FFFF + ((abs_bits >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(abs_bits < BITS_2_MINUS_6, subnormal, normal)
    return (tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)
