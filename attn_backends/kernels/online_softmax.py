"""Online softmax helpers shared by the attention kernels, which keep scores as exponents of 2: e^x is 2^(x LOG2_E).

Constants are local to a function: at each launch Triton compares a kernel's globals with those of its compilation.
"""

from __future__ import annotations

from builders.kernels.triton_runtime import tl, triton


@triton.jit
def apply_softcap(qk, softcap):
    """softcap * tanh(qk / softcap), by tanh(x) = sign(x) (1 - r) / (1 + r) with r = e^(-2 |x|)."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    r = tl.exp2(tl.abs(qk / softcap) * (-2.0 * LOG2_E))
    return softcap * tl.where(qk >= 0, 1.0, -1.0) * (1.0 - r) / (1.0 + r)


@triton.jit
def sink_exponent(sink):
    """Return a sink as an exponent of 2. +inf becomes finite but outweighs every score, which avoids inf - inf."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    SINK_LIMIT: tl.constexpr = 1e30  # next to a sink this large, no score has a weight
    return tl.where(sink > SINK_LIMIT, SINK_LIMIT, sink * LOG2_E)
