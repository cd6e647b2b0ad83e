"""Numbers that kernels of several rooms know by name."""

from __future__ import annotations

from builders.kernels.triton_runtime import tl

INT32_MAX = tl.constexpr(2**31 - 1)
"""An index after every other."""
